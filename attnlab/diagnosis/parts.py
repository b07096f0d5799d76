"""Parts of sequences that one kernel stores and another one merges: which of the two is wrong?

The record of an op says what the parts mean (:attr:`attnlab.library.op.Op.parts`). Parts that programs have
stored are merged here in float64 and compared with the output and with the right one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from attnlab.kernels.binding import evaluate
from attnlab.kernels.triton.probe import Elements, LaunchLog, joined
from attnlab.lab.problem import Problem
from attnlab.library.op import names_in

_RIGHT_PARTS, _RIGHT_MERGE = "stores are right", "merges them rightly"
_ULPS = 4.0  # two roundings of one number, and of the sum before it


def part_facts(
    parts: Mapping[str, str],
    launches: Sequence[LaunchLog],
    output: torch.Tensor,
    problem: Problem,
    is_wrong: torch.Tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield which kernel of an op is wrong, each with the rows and heads that this concerns.

    ``parts``: of the op's record. ``launches``: of a run, with accesses; ``output``: its output
    [num_tokens, num_heads, head_size], and ``problem`` what it is of. ``is_wrong``, and the yielded tensors:
    [num_tokens, num_heads] bool.
    """
    at = next((i for i, one in enumerate(launches) if _name(one) == parts.get("kernel")), 0)
    if not at or output.element_size() == 1 or not bool(is_wrong.any()):
        return
    stores = [joined(log.stores) for launch in launches[:at] for log in launch.programs]
    if not stores:  # the grid has no program
        return
    merged = _merged(parts, launches[at], np.unique(np.concatenate(stores)))
    if merged is None or any(a < b for a, b in zip(merged.shape, output.shape, strict=True)):
        return
    merged, output = merged[: len(output), : output.shape[1], : output.shape[2]], output.double()
    right = problem.correct_output()
    if right.output.shape != output.shape:  # the values of MLA are a part of its keys
        return
    is_right = ((merged - right.output).abs() <= right.bound).all(-1)
    slack = right.bound + _ULPS * torch.finfo(torch.bfloat16).eps * merged.abs()
    is_same = torch.isclose(merged, output, rtol=0.0, atol=0.0, equal_nan=True)
    is_same = (is_same | ((merged - output).abs() <= slack)).all(-1)
    merging, storing = _name(launches[at]), _name(launches[at - 1])
    if bool((found := is_wrong & is_right).any()):
        yield f"{merging} merges wrongly: the parts that {storing} {_RIGHT_PARTS}", found
    if bool((found := is_wrong & ~is_right & is_same).any()):
        yield f"{storing} stores wrong parts: {merging} {_RIGHT_MERGE}", found


def is_part_fact(fact: str) -> bool:
    """Answer whether a statement says which of the two kernels is wrong."""
    return fact.endswith((_RIGHT_PARTS, _RIGHT_MERGE))


def _name(launch: LaunchLog) -> str:
    return str(launch.function.fn.__name__)


def _merged(parts: Mapping[str, str], launch: LaunchLog, stored: np.ndarray) -> torch.Tensor | None:
    """Return the merge of the parts that are stored, [rows, heads, size] float64; 0 for none.

    ``stored``: addresses (uint64). None if the launch has other parts than the record describes.
    """
    given = {**launch.arguments, "ln2": math.log(2), "arange": torch.arange}
    masks = {
        name: Elements(value).at(stored)
        for name, value in launch.arguments.items()
        if name in names_in(parts["logarithms"])
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
    }
    values, logarithms, sums, sinks = (
        evaluate(parts.get(field, "None"), given)
        for field in ("values", "logarithms", "sums", "sinks")
    )
    is_stored = evaluate(parts["logarithms"], {**given, **masks}) != 0
    if values.dim() != 4 or logarithms.shape != values.shape[:3]:
        return None
    logarithms = logarithms.double().where(is_stored, -torch.inf)
    sums = torch.ones_like(logarithms) if sums is None else sums.double()
    highest = logarithms.amax(-1, keepdim=True)
    if sinks is not None:
        highest = highest.maximum(sinks.double()[:, None])
    highest = highest.where(highest > -torch.inf, 0.0)
    factors = (logarithms - highest).exp()
    # A part that is not stored, or has no key, may hold anything.
    used = torch.where(factors[..., None] == 0, 0.0, values.double() * factors[..., None])
    total = (sums * factors).where(factors != 0, 0.0).sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.double()[:, None] - highest).exp()
    merged: torch.Tensor = used.sum(2) / total.where(total != 0, 1.0)
    return merged
