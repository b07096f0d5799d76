"""Models of vLLM's attention kernels in torch: they follow the contracts, on any machine."""
