"""Recorded operations compute what Triton's language computes."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from attnlab.kernels.triton import type_cache
from attnlab.kernels.triton.interpreter import interpreted_triton
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.kernels.triton.lockstep.launch import using_lockstep

if find_spec("triton") is None:
    pytest.skip("needs the triton extra", allow_module_level=True)
triton = interpreted_triton()
tl = triton.language


@triton.jit
def chosen(data, out, at, SIGN: tl.constexpr):
    """Load a scalar, or ``other`` if ``at`` is past the end; Triton looks at the number of ``other``."""
    place = tl.program_id(0)
    other = tl.load(data + at)
    value = tl.load(data + place, mask=place < 1, other=other)
    tl.store(out + place, (value + 1) * SIGN)


@triton.jit
def squared(one, other, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(one + at), tl.load(other + at)
    tl.store(out + at, x * x + x * y)


@pytest.fixture(params=[True, False], ids=["lockstep", "one by one"])
def lockstep(request):
    with using_lockstep(request.param), launching(LaunchPlan()):
        yield


def run(data, at, sign):
    out = torch.zeros(2)
    chosen[(2,)](torch.tensor(data), out, at, sign)
    return out.tolist()


def test_what_looks_at_numbers_is_not_recorded(lockstep, no_records):
    """The load of the first launch has an ``other`` of 0, which Triton leaves out."""
    assert run([0.0, 5.0], 0, 1) == [1, 1]
    assert run([0.0, 5.0], 1, 1) == [1, 6]


def test_a_record_that_ignored_it_would_be_wrong(lockstep, no_records, monkeypatch):
    monkeypatch.setattr(type_cache._Recorder, "look_at", lambda *given: None)
    assert run([0.0, 5.0], 0, 1) == [1, 1]
    assert run([0.0, 5.0], 1, 1) == [1, 1]


def test_a_product_of_a_value_with_itself_is_not_that_of_two_values(lockstep, no_records):
    out = torch.zeros(2)
    squared[(1,)](torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0]), out, 2)
    assert out.tolist() == [14, 30]


def test_constants_that_are_equal_but_not_the_same(lockstep, no_records):
    """0.0 and -0.0 are equal, as 1 and True are."""
    signs = [run([-2.0, 0.0], 0, sign)[0] for sign in (0.0, -0.0, 1, True)]
    assert np.signbit(signs).tolist() == [True, False, True, True]


def test_operations_count_as_without_records(no_records):
    """So that a limit of operations stops the same runs, whether a record is there or not."""
    counts = []
    for _ in range(2):
        plan = LaunchPlan()
        with using_lockstep(False), launching(plan):
            run([1.0, 5.0], 0, 3)
        counts.append(plan.observed.operations)
    assert counts[0] == counts[1] > 20
