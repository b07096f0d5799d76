"""What each op and kernel requires, which kernels vLLM runs, and where a call violates their contracts."""
