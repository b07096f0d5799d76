"""Right kernels that damage row 0 in one of every four calls, for ``--backend flaky_attention.py:NAME``.

``adds`` is deterministic and adds its result to the output buffer. ``zeroes`` writes zeros in place of a
result that is NaN.
"""

from collections.abc import Callable

import torch

from attnlab.tensors.call import KernelCall
from helpers.plugins import RIGHT

_names: dict[str, Callable[[KernelCall], None]] = {}
exec(RIGHT, _names)
_sound = _names["my_attention"]


def _every_fourth(at: int) -> Callable[[KernelCall], None]:
    """Return a kernel whose calls number ``at``, ``at`` + 4, … are damaged, counted from 0."""
    calls = 0

    def run(call: KernelCall) -> None:
        nonlocal calls
        _sound(call)
        if calls % 4 == at:
            call.output[0] += 0.5
        calls += 1

    run.op = "unified_attention"
    return run


first, second, fourth = (_every_fourth(at) for at in (0, 1, 3))


def adds(call: KernelCall) -> None:
    before = call.output.clone()
    _sound(call)
    call.output[0] += before[0]


def zeroes(call: KernelCall) -> None:
    """Read NaN from empty slots in row 0: with zeros in the slots the row is 0."""
    _sound(call)
    total = sum(cache.float().sum() for cache in (call.key_cache, call.value_cache))
    call.output[0] = 0.0 if torch.isfinite(total) else torch.nan


adds.op = zeroes.op = "unified_attention"
