"""Which defects a test would notice."""
