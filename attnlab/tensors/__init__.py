"""Batch, PagedCache and KernelCall: the tensors of one attention call."""
