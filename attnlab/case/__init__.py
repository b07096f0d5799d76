"""Case, the configuration of one attention call, and what describes one without tensors (no torch)."""
