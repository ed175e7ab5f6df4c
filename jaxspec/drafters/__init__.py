"""Drafters propose tokens. `base` says what a drafter is."""
