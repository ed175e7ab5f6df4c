"""Plans: which settings fit a memory budget, and which of them are fastest."""
