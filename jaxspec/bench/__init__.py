"""Measurements: each module runs with `python -m` and prints its figures beside their baseline."""
