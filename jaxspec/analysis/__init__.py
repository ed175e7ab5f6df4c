"""What was measured, made sense of: costs of rounds, acceptance, drafters prompt by prompt."""
