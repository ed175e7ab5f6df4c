"""The lab: everything that measures, compares and predicts, above the engine."""
