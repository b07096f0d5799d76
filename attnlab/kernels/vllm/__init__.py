"""vLLM's own Triton ops, from an installed package, a wheel, an sdist or a clone."""
