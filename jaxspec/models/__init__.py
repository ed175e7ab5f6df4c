"""The decoder, its configuration, and named presets."""
