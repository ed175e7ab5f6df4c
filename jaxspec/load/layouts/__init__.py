"""Drafters as other projects store them: one module per layout, with a table of its tensors."""
