"""The contracts' kernels in torch, on any machine."""
