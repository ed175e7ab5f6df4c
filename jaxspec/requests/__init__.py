"""What goes into an engine and what comes out: host records of plain Python values."""
