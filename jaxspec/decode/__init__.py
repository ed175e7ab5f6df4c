"""Rounds and the loop around them."""
