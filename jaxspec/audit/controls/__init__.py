"""Negative controls: known faults, which the audit has to catch."""
