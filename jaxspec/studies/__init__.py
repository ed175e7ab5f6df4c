"""Studies, grids of many runs: the published one of 2510.22876, and how acceptance scales."""
