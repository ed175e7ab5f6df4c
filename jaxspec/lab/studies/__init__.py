"""Studies, which are grids of many runs: the published study of 2510.22876, and how acceptance
scales."""
