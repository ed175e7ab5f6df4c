"""Drafters: what proposes tokens. `base` states the protocol."""
