"""Converted directories (`format`), and the names that load a model (`resolve`)."""
