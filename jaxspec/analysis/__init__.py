"""Models of what was measured: what a round costs, and what speculation gains."""
