"""No interpreted kernel reads or writes memory outside its tensors, whatever pointer it makes.

The tensors here lie inside of larger arrays, so that a write next to them is seen. Uncontained, most of these
kernels would end the process.
"""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from attnlab.case.errors import Unavailable
from attnlab.kernels.triton import block_pointers, interpreter, patches, run_log
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton extra")
if find_spec("triton") is not None:
    triton = interpreter.interpreted_triton()
    from triton.runtime import interpreter as stock

    tl = triton.language

    @triton.jit
    def shifted(data, out, shift, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(out + at, tl.load(data + shift + at))
        tl.store(data + shift + at, at)

    @triton.jit
    def masked(data, out, shift, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(data + shift + at, at, mask=at >= 1)
        tl.store(out + at, tl.load(data + shift + at, mask=at >= 1, other=-1))

    @triton.jit
    def wide(data, out, shift, SIZE: tl.constexpr):
        at = (data + shift).to(tl.pointer_type(tl.int64))
        tl.store(out, (tl.load(at) != 0).to(tl.int32))
        tl.store(at, -1)

    @triton.jit
    def atomic(data, out, shift, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.atomic_add(data + shift + at, at + 1)
        tl.atomic_max((data + shift).to(tl.pointer_type(tl.int64)), 1)

    @triton.jit
    def blocks(data, out, shift, SIZE: tl.constexpr):
        at = tl.make_block_ptr(data, (SIZE,), (1,), (shift,), (SIZE,), (0,))
        tl.store(out + tl.arange(0, SIZE), tl.load(at))
        tl.store(at, tl.arange(0, SIZE))

    @triton.jit
    def moved(data, out):
        here = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
        at = tl.make_block_ptr(data, (3, 5), (5, 1), (0, 1), (2, 4), (1, 0))
        tl.store(out + here, tl.load(at))
        at = tl.advance(at, (2, 2))
        tl.store(out + 8 + here, tl.load(at, boundary_check=(0, 1), padding_option="zero"))
        tl.store(out + 16 + here, tl.load(tl.advance(at, (-2, 0)), boundary_check=(0,)))

    @triton.jit
    def wild(data, out, shift, SIZE: tl.constexpr):
        at = (shift.to(tl.int64) * 4097).to(tl.pointer_type(tl.int32))
        tl.store(out, tl.load(at))
        tl.store(at, 1)
        tl.store(at + 2**40, 1)
        tl.atomic_add(at, 1)

    @triton.jit
    def sums(inputs, out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(out + at, tl.load(inputs[0] + at) + tl.load(inputs[1] + at))

    @triton.jit
    def exchanged(data, out, shift, SIZE: tl.constexpr):
        tl.atomic_cas(data, 0, 1)


def guarded() -> tuple[np.ndarray, torch.Tensor]:
    """Return an array of 64 numbers 7, and a tensor of 8 of them whose memory is the middle."""
    around = np.full(64, 7, dtype=np.int32)
    return around, torch.frombuffer(around, dtype=torch.int32, count=8, offset=28 * 4)


@pytest.mark.parametrize("shift", [-40, -3, -1, 1, 6, 7, 8, 2**31 - 9])
@pytest.mark.parametrize("name", ["shifted", "masked", "wide", "atomic", "blocks", "wild"])
def test_nothing_outside_is_written(name: str, shift: int) -> None:
    """With and without masks, by elements that are partly inside, by atomics and by block pointers."""
    around, data = guarded()
    out, plan = torch.zeros(8, dtype=torch.int32), LaunchPlan()
    with launching(plan):
        globals()[name][(1,)](data, out, shift, SIZE=8)
    outside = np.delete(around, slice(28, 36))
    assert (outside == 7).all()
    assert plan.observed.outside or (name, shift) in {("masked", -1), ("wide", 1), ("wide", 6)}


def test_an_element_that_is_partly_inside_is_outside() -> None:
    """The last 4 bytes of a tensor are no int64, and the access says how much of it is outside."""
    around, data = guarded()
    plan, out = LaunchPlan(), torch.zeros(8, dtype=torch.int32)
    with launching(plan):
        wide[(1,)](data, out, 7, SIZE=8)
    assert (around == 7).all()
    texts = [one.text() for one in plan.observed.outside.values()]
    assert any("8 bytes, 4 of them after the end of data" in text for text in texts), texts


def test_tensors_in_a_tuple_are_inside() -> None:
    """They have names of their own, and nothing is reported about them."""
    plan, out = LaunchPlan(), torch.zeros(4)
    with launching(plan):
        sums[(1,)]((torch.ones(4), torch.full((4,), 2.0)), out, SIZE=4)
    assert out.tolist() == [3.0] * 4
    assert not plan.observed.outside


def test_what_cannot_be_contained_is_refused() -> None:
    """It is not run: no verdict about the kernel."""
    _, data = guarded()
    with launching(LaunchPlan()), pytest.raises(Unavailable, match="atomic_cas"):
        exchanged[(1,)](data, data, 0, SIZE=8)


def test_the_size_of_what_is_stored_is_that_of_an_element(monkeypatch) -> None:
    """Triton copies as many bytes as the value has: one with the wrong NumPy dtype would write too many."""
    around, data = guarded()
    plan, before = LaunchPlan(), stock.InterpreterBuilder.create_make_range

    def too_wide(self, *given):
        found = before(self, *given)
        found.data = found.data.astype(np.int64)
        return found

    monkeypatch.setattr(stock.InterpreterBuilder, "create_make_range", too_wide)
    with launching(plan):
        shifted[(1,)](data, torch.zeros(8, dtype=torch.int32), 0, SIZE=8)
    assert around[28:36].tolist() == list(range(8))
    assert (np.delete(around, slice(28, 36)) == 7).all()


def test_an_error_of_the_lab_is_not_the_kernels(monkeypatch) -> None:
    """It says so, with the place, and is no failure of the kernel."""

    monkeypatch.setattr(run_log, "bisect_right", None)
    out = torch.zeros(8, dtype=torch.int32)
    with (
        launching(LaunchPlan()),
        pytest.raises(Unavailable, match=r"attnlab's own interpreter failed at run_log\.py:\d+: "),
    ):
        shifted[(1,)](out, out, 0, SIZE=8)


def test_what_triton_cannot_interpret_is_named(monkeypatch) -> None:
    """An operation that the builder of this Triton lacks is a limit of the interpreter."""
    from triton import __version__

    monkeypatch.delattr(stock.InterpreterBuilder, "create_make_range")
    out = torch.zeros(8, dtype=torch.int32)
    with (
        launching(LaunchPlan()),
        pytest.raises(
            Unavailable, match=f"the interpreter of Triton {__version__} cannot run this kernel: "
        ),
    ):
        shifted[(1,)](out, out, 0, SIZE=8)


def test_block_pointers_move_and_check_the_dimensions_that_they_are_asked_to() -> None:
    """A matrix of 3 × 5 in tiles of 2 × 4. What is outside a checked dimension is 0."""
    data, out = torch.arange(1, 16), torch.full((3, 2, 4), -1)
    with launching(LaunchPlan()):
        moved[(1,)](data, out)
    rows = data.view(3, 5)
    assert out[0].tolist() == [rows[0, 1:].tolist(), rows[1, 1:].tolist()]
    assert out[1].tolist() == [[*rows[2, 3:].tolist(), 0, 0], [0, 0, 0, 0]]
    assert out[2].tolist() == [[4, 5, 6, 7], [9, 10, 11, 12]]


def test_masks_as_arrays_are_accepted() -> None:
    """Triton 3.6 gives an array, not a handle, for block pointers."""
    pointers = stock.TensorHandle(np.zeros((2, 2), dtype=np.uint64), stock.tl.int64)
    for mask in (np.ones((2, 2), dtype=bool), np.ones((2, 1), dtype=bool), None):
        found = patches._as_mask(stock, mask, pointers)
        assert found.data.shape == (2, 2)
        assert found.data.all()


def test_a_function_that_triton_has_no_more_is_named(monkeypatch) -> None:
    """Triton 3.8 and later have no block pointers, but for those of the lab."""
    if not block_pointers.is_needed(stock):
        pytest.skip("this Triton has block pointers")
    monkeypatch.setattr(patches, "is_needed", lambda interpreter: False)
    monkeypatch.setattr(patches, "_KEPT", {})
    _, data = guarded()
    with (
        launching(LaunchPlan()),
        pytest.raises(Unavailable, match="Block pointers have been removed"),
    ):
        blocks[(1,)](data, data, 0, SIZE=8)
