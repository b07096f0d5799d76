"""Case, and everything that describes one without tensors."""
