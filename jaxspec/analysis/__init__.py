"""Analysis of measurements: costs of rounds, acceptance, drafters prompt by prompt."""
