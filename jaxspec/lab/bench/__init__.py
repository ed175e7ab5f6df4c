"""Measurements: each module runs with `python -m` and prints its results next to their baseline."""
