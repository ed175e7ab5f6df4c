"""Other frameworks that run engines; none of them is needed otherwise."""
