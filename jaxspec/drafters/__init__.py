"""Drafters propose tokens. `base` defines the protocol."""
