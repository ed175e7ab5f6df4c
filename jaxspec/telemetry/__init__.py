"""Traces of rounds, counts on the host, and frames."""
