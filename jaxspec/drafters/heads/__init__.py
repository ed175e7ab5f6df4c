"""Drafters that read the target's hidden states: Medusa, Hydra, Clover, Clover-2."""
