"""The cost model: what rounds and prompts cost on a device."""
