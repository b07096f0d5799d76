"""Which defect explains an output."""
