"""What rounds record, counts on the host, frames."""
