"""Products and attention: XLA's, Pallas', and C++ for CPUs."""
