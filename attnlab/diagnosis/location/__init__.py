"""location."""
