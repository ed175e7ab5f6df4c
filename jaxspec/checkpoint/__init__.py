"""Directories of models and drafters: their files (`format`), and what these say of themselves
(`manifest`)."""
