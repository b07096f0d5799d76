"""Statements about what the programs of a Triton kernel store, from their recorded addresses and values."""

from collections.abc import Callable, Iterator

import torch

from attnlab.case.case import Case
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.kernels.triton.stores import TensorStores, stores_of
from attnlab.lab.result import Result

_CONFLICT = "stores other numbers to elements of"


def store_facts(case: Case, is_wrong: torch.Tensor, run: Callable[[Case], Result]) -> Iterator[str]:
    """Yield what is wrong with the stores of a Case.

    ``is_wrong``: [num_tokens, num_heads] bool, the wrong rows and heads of its output. Only the interpreter
    records stores.
    """
    if case.backend != "vllm":
        return
    # Stores of NaN by all programs would hide a conflict.
    known = case.replace(empty_slots="garbage")
    with probing(Probe(records=True)) as probe:
        output = run(known).output
    for stores in stores_of(probe.launches):
        # the kernels of an op may have several names for the output
        name = "the output" if _is_output(stores.tensor, output) else stores.name
        for place in stores.conflicts:
            yield f"{place} {_CONFLICT} {name} that another program stores to"
        if _is_output(stores.tensor, output) and bool(
            (_unwritten(stores, is_wrong) & is_wrong).any()
        ):
            yield "no kernel writes some elements of the output"


def is_conflict(fact: str) -> bool:
    """Answer whether a statement says that programs store different numbers to the same elements.

    That is a fault even if the output is right: the order of the programs decides which number stays.
    """
    return _CONFLICT in fact


def _is_output(tensor: torch.Tensor, output: torch.Tensor) -> bool:
    """Answer whether a tensor is the output, maybe with rows of padding; scratch memory has other sizes."""
    same = tensor.shape[1:] == output.shape[1:] and tensor.dtype == output.dtype
    return same and len(tensor) >= len(output)


def _unwritten(stores: TensorStores, is_wrong: torch.Tensor) -> torch.Tensor:
    """Return which rows and heads have elements that no program stores to."""
    return stores.unwritten[: len(is_wrong)].any(-1)
