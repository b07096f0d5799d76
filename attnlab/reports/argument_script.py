"""The op argument of a Case in a script, and the script of a merge."""

from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.ops import MERGE, WRAPPER
from attnlab.contracts.target import Target
from attnlab.kernels.vllm.op_calls import OP_CALLS
from attnlab.kernels.vllm.strides import USED_STRIDES
from attnlab.lab.lab import Lab
from attnlab.reports.mask_script import tensor_text

_BLOCK_POINTERS = "block_pointers"
# The dimension of each tensor whose last index is beyond 2^31 elements.
_FAR = {name: one.far_dim for name, one in OP_ARGUMENTS.items() if one.far_dim is not None}
SCRIPTED = (NONE, "tensor_descriptors", _BLOCK_POINTERS, *_FAR)
_MERGED = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")


def has_merge_script(case: Case) -> bool:
    """Answer whether a script can reproduce a Case of merge_attn_states: a merge of two parts alone."""
    plain = case.kv_cache_dtype == "auto" and not case.pad_batch
    return case.op == MERGE and case.op_argument in (NONE, *_FAR) and plain


def argument_facts(case: Case) -> dict[str, Any]:
    """Return what the templates need for an op argument.

    Its name, "" for none; the names of its tensors; the dimension that is far apart.
    """
    if case.op_argument == NONE:
        return {"op_argument": "", "names": (), "far_dim": 0}
    names: tuple[str, ...] = ()
    dim = _FAR.get(case.op_argument, 0)
    if case.op_argument in _FAR:
        names = tuple(name for name, used in USED_STRIDES[case.op].items() if dim < used)
    if case.op_argument == _BLOCK_POINTERS:
        names = ("key_cache", "block_table") if case.op == WRAPPER else ("k_cache", "b_loc")
    return {"op_argument": case.op_argument, "names": names, "far_dim": dim}


def merge_facts(case: Case) -> dict[str, Any]:
    """Return the parts of a merge as text."""
    plain = case.replace(backend="model", op_argument=NONE, trace_reads=False)
    arguments = OP_CALLS[MERGE].arguments(Lab().call(plain), Target.of(plain))
    parts: dict[str, torch.Tensor] = {name: arguments[name] for name in _MERGED}
    return {"tensors": {name: tensor_text(one) for name, one in parts.items()}}
