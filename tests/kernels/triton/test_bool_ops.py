"""``and`` and ``or`` of blocks under the interpreter: element by element, as Triton compiles them."""

from importlib.util import find_spec

import pytest
import torch

from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="the interpreter needs the triton extra"
)


def test_blocks_are_combined():
    triton = interpreter.interpreted_triton()
    tl = triton.language

    @triton.jit
    def kernel(both, either, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        inside = at >= 2 and at < 5
        outside = at < 2 or at >= 5 or at == 3
        tl.store(both + at, inside.to(tl.int32))
        tl.store(either + at, outside.to(tl.int32))

    kernel.fn.__globals__["tl"] = tl
    both, either = torch.zeros(2, 8, dtype=torch.int32).unbind()
    with launching(LaunchPlan()):
        kernel[(1,)](both, either, SIZE=8)
    assert both.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    assert either.tolist() == [1, 1, 0, 1, 0, 1, 1, 1]


def test_chained_comparisons_of_blocks():
    """Python would keep the last comparison alone; a constant that is false ends the chain."""
    triton = interpreter.interpreted_triton()
    tl = triton.language

    @triton.jit
    def kernel(out, pointer, NONE: tl.constexpr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        inside = 2 <= at < 5
        tl.store(out + at, inside.to(tl.int32) + (0 < at <= at != 3).to(tl.int32))
        if 1 < NONE < tl.load(pointer):
            tl.store(out, 9)

    kernel.fn.__globals__["tl"] = tl
    out = torch.zeros(8, dtype=torch.int32)
    with launching(LaunchPlan()):
        kernel[(1,)](out, None, NONE=0, SIZE=8)
    assert out.tolist() == [0, 1, 2, 1, 2, 1, 1, 1]


def test_the_second_operand_of_scalars_may_be_skipped():
    """A constexpr condition protects an operand that cannot be computed."""
    triton = interpreter.interpreted_triton()
    tl = triton.language

    @triton.jit
    def kernel(out, pointer, FLAG: tl.constexpr):
        if FLAG and tl.load(pointer) > 0:
            tl.store(out, 1)
        if not FLAG or tl.load(pointer) > 0:
            tl.store(out + 1, 1)

    kernel.fn.__globals__["tl"] = tl
    out = torch.zeros(2, dtype=torch.int32)
    with launching(LaunchPlan()):
        kernel[(1,)](out, None, FLAG=False)
    assert out.tolist() == [0, 1]
