"""Statements about what the programs of a Triton kernel store, from their recorded addresses and values."""

from collections.abc import Callable, Iterator

import torch

from attnlab.case.case import Case
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.kernels.triton.stores import TensorStores, stores_of
from attnlab.lab.result import Result

UNWRITTEN = "no kernel writes"
_CONFLICT = "stores other numbers to elements of"


def store_facts(
    case: Case, is_wrong: torch.Tensor, run: Callable[[Case], Result]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is wrong with the stores of a Case, each with the rows and heads that it concerns.

    ``is_wrong``: [num_tokens, num_heads] bool, the wrong rows and heads of its output, as are the yielded
    tensors. A conflict in scratch memory may concern all of them. Only the interpreter records stores.
    """
    if case.backend != "vllm":
        return
    # Stores of NaN by all programs would hide a conflict.
    known = case.replace(empty_slots="garbage")
    with probing(Probe(records=True)) as probe:
        output = run(known).output
    for stores in stores_of(probe.launches):
        # the kernels of an op may have several names for the output
        is_output = _is_output(stores.tensor, output)
        name = "the output" if is_output else stores.name
        for place, addresses in stores.conflicts.items():
            cells = torch.ones_like(is_wrong)
            if is_output:
                cells = stores.holds(addresses)[: len(is_wrong)].any(-1)
            yield f"{place} {_CONFLICT} {name} that another program stores to", cells
        unwritten = _unwritten(stores, is_wrong) & is_wrong if is_output else is_wrong[:0]
        if bool(unwritten.any()):
            yield f"{UNWRITTEN} some elements of the output", unwritten


def is_conflict(fact: str) -> bool:
    """Answer whether a statement says that programs store different numbers to the same elements.

    That is a fault even if the output is right: the order of the programs decides which number stays.
    """
    return _CONFLICT in fact


def _is_output(tensor: torch.Tensor, output: torch.Tensor) -> bool:
    """Answer whether a tensor is the output, maybe in FP8 or with rows of padding.

    Scratch memory has other sizes.
    """
    is_format = tensor.dtype == output.dtype or tensor.element_size() == 1
    return tensor.shape[1:] == output.shape[1:] and is_format and len(tensor) >= len(output)


def _unwritten(stores: TensorStores, is_wrong: torch.Tensor) -> torch.Tensor:
    """Return which rows and heads have elements that no program stores to."""
    return stores.unwritten[: len(is_wrong)].any(-1)
