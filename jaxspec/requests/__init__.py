"""Requests and completions: host-side records of plain Python values."""
