"""Verifiers: what decides how much of a draft is kept."""
