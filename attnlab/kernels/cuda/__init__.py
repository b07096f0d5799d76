"""vLLM's CUDA source of cache writes, compiled for the emulated device."""
