"""Batch, PagedCache and KernelCall: the tensors of one attention call."""

from attnlab.tensors.cache import Batch, PagedCache, Provenance, make_batch, make_cache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_call, make_output

__all__ = [
    "Batch",
    "KernelCall",
    "PagedCache",
    "Provenance",
    "make_batch",
    "make_cache",
    "make_call",
    "make_output",
]
