"""vLLM's csrc/rocm attention on a CPU: an emulated AMD device, and the source adapted to it."""
