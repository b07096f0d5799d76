"""No interpreted kernel reads or writes memory outside its tensors, whatever pointer it makes.

The tensors here lie inside of larger arrays, so that a write next to them is seen. Uncontained, most of these
kernels would end the process."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from helpers.sources import needs_triton

from attnlab.case.errors import Unavailable
from attnlab.kernels.triton import interpreter, patches, run_log
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.kernels.triton.run_log import Memory, RunLog, numbers_outside, other_outside

pytestmark = needs_triton
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
    def columns(data, out, stride):
        """Each program copies a row of 5 numbers, tile after tile, with strides from an argument."""
        row = tl.program_id(0)
        here = out + row * 8 + tl.arange(0, 2)[:, None] + tl.arange(0, 1)[None, :]
        at = tl.make_block_ptr(data + row * 5, (5, 1), (1, stride), (0, 0), (2, 1), (1, 0))
        for start in range(0, 6, 2):
            tl.store(here + start, tl.load(at, boundary_check=(0,), padding_option="zero"))
            at = tl.advance(at, (2, 0))

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

    @triton.jit
    def copy(source, target, count, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(target + at, tl.load(source + at, mask=at < count, other=0.0).to(tl.float32))

    @triton.jit
    def encode(source, target, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(target + at, tl.load(source + at))

    @triton.jit
    def product(index, stride, target):
        tl.store(target, tl.load(index) * stride)

    @triton.jit
    def wide_product(index, stride: tl.int64, target):
        tl.store(target, tl.load(index) * stride)


def launched(kernel, *args, programs: int = 1, **sizes) -> RunLog:
    """Run programs of a kernel; return what was observed."""
    plan = LaunchPlan()
    with launching(plan):
        kernel[(programs,)](*args, **sizes)
    return plan.observed


def guarded() -> tuple[np.ndarray, torch.Tensor]:
    """Return an array of 64 numbers 7, and a tensor of 8 of them whose memory is the middle."""
    around = np.full(64, 7, dtype=np.int32)
    return around, torch.frombuffer(around, dtype=torch.int32, count=8, offset=28 * 4)


@pytest.mark.parametrize("shift", [-40, -3, -1, 1, 6, 7, 8, 2**31 - 9])
@pytest.mark.parametrize("name", ["shifted", "masked", "wide", "atomic", "blocks", "wild"])
def test_nothing_outside_is_written(name: str, shift: int) -> None:
    """With and without masks, by elements that are partly inside, by atomics and by block pointers."""
    around, data = guarded()
    out = torch.zeros(8, dtype=torch.int32)
    log = launched(globals()[name], data, out, shift, SIZE=8)
    assert (np.delete(around, slice(28, 36)) == 7).all()
    assert log.outside or (name, shift) in {("masked", -1), ("wide", 1), ("wide", 6)}


def test_an_element_that_is_partly_inside_is_outside() -> None:
    """The last 4 bytes of a tensor are no int64, and the access says how much of it is outside."""
    around, data = guarded()
    log = launched(wide, data, torch.zeros(8, dtype=torch.int32), 7, SIZE=8)
    assert (around == 7).all()
    texts = [one.text() for one in log.outside.values()]
    assert any("8 bytes, 4 of them after the end of data" in text for text in texts), texts


def test_tensors_in_a_tuple_are_inside() -> None:
    """They have names of their own, and nothing is reported about them."""
    out = torch.zeros(4)
    log = launched(sums, (torch.ones(4), torch.full((4,), 2.0)), out, SIZE=4)
    assert out.tolist() == [3.0] * 4
    assert not log.outside


def test_what_cannot_be_contained_is_refused() -> None:
    """It is not run: no verdict about the kernel."""
    _, data = guarded()
    with pytest.raises(Unavailable, match="atomic_cas"):
        launched(exchanged, data, data, 0, SIZE=8)


def test_the_size_of_what_is_stored_is_that_of_an_element(monkeypatch) -> None:
    """Triton copies as many bytes as the value has: one with the wrong NumPy dtype would write too many."""
    around, data = guarded()
    before = stock.InterpreterBuilder.create_make_range

    def too_wide(self, *given):
        found = before(self, *given)
        found.data = found.data.astype(np.int64)
        return found

    monkeypatch.setattr(stock.InterpreterBuilder, "create_make_range", too_wide)
    launched(shifted, data, torch.zeros(8, dtype=torch.int32), 0, SIZE=8)
    assert around[28:36].tolist() == list(range(8))
    assert (np.delete(around, slice(28, 36)) == 7).all()


def test_an_error_of_the_lab_is_not_the_kernels(monkeypatch) -> None:
    """It says so, with the place, and is no failure of the kernel."""

    monkeypatch.setattr(run_log, "bisect_right", None)
    out = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(Unavailable, match=r"attnlab's own interpreter failed at run_log\.py:\d+: "):
        launched(shifted, out, out, 0, SIZE=8)


def test_what_triton_cannot_interpret_is_named(monkeypatch, no_records) -> None:
    """An operation that the builder of this Triton lacks is a limit of the interpreter."""
    from triton import __version__

    monkeypatch.delattr(stock.InterpreterBuilder, "create_make_range")
    out = torch.zeros(8, dtype=torch.int32)
    words = f"the interpreter of Triton {__version__} cannot run this kernel: "
    with pytest.raises(Unavailable, match=words):
        launched(shifted, out, out, 0, SIZE=8)


def test_block_pointers_move_and_check_the_dimensions_that_they_are_asked_to() -> None:
    """A matrix of 3 × 5 in tiles of 2 × 4. What is outside a checked dimension is 0."""
    data, out = torch.arange(1, 16), torch.full((3, 2, 4), -1)
    launched(moved, data, out)
    rows = data.view(3, 5)
    assert out[0].tolist() == [rows[0, 1:].tolist(), rows[1, 1:].tolist()]
    assert out[1].tolist() == [[*rows[2, 3:].tolist(), 0, 0], [0, 0, 0, 0]]
    assert out[2].tolist() == [[4, 5, 6, 7], [9, 10, 11, 12]]


def test_each_program_has_block_pointers_of_its_own() -> None:
    data, out = torch.arange(1, 16), torch.full((3, 8), -1)
    launched(columns, data, out, 1, programs=3)
    assert out[:, :6].tolist() == [[*row, 0] for row in data.view(3, 5).tolist()]


def test_masks_as_arrays_are_accepted() -> None:
    """Triton 3.6 gives an array, not a handle, for block pointers."""
    pointers = stock.TensorHandle(np.zeros((2, 2), dtype=np.uint64), stock.tl.int64)
    for mask in (np.ones((2, 2), dtype=bool), np.ones((2, 1), dtype=bool), None):
        found = patches._as_mask(stock, mask, pointers)
        assert found.data.shape == (2, 2)
        assert found.data.all()


def test_a_function_that_triton_has_no_more_is_named(monkeypatch) -> None:
    """Triton 3.8 and later have no block pointers, but for those of the lab."""
    if hasattr(stock.InterpreterBuilder, "create_make_block_ptr"):
        pytest.skip("this Triton has block pointers")
    monkeypatch.setattr(patches, "patch_block_pointers", lambda interpreter, scope: None)
    monkeypatch.setattr(patches, "_KEPT", {})
    _, data = guarded()
    with pytest.raises(Unavailable, match="Block pointers have been removed"):
        launched(blocks, data, data, 0, SIZE=8)


# FP8 conversion, int32 overflow and out-of-bounds accesses under the interpreter.


FP8 = {
    "float8e4nv": torch.float8_e4m3fn,
    "float8e4b8": torch.float8_e4m3fnuz,
    "float8e5": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", FP8.values(), ids=FP8)
def test_every_fp8_byte_is_decoded(dtype):
    """All 256 bytes decode as in torch, NaN and infinity included."""
    source = torch.arange(256, dtype=torch.uint8).view(dtype)
    target = torch.empty(256)
    copy[(1,)](source, target, 256, SIZE=256)
    torch.testing.assert_close(target, source.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FP8.values(), ids=FP8)
def test_fp8_is_rounded_to_nearest_even_and_saturated(dtype):
    """15.9 becomes 16, not 8; ties round to even; out of range becomes the largest value."""
    limit = torch.finfo(dtype).max
    values = torch.cat([torch.linspace(-20, 20, 1000), torch.tensor([15.9, 1e6, -1e6, 2.0**-9])])
    values = torch.nn.functional.pad(values, (0, 1024 - len(values)))
    target = torch.empty(1024, dtype=dtype)
    encode[(1,)](values, target, SIZE=1024)
    expected = values.clamp(-limit, limit).to(dtype)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    assert float(target[1000]) == 16.0


def test_an_int32_product_that_wraps_is_told():
    """An overflow of int32 × int32 is recorded with its line; a tl.int64 stride records none."""
    index, target = torch.tensor([70000], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    (wrap,) = launched(product, index, 65536, target).wraps.values()
    assert (wrap.left, wrap.right) == (70000, 65536)
    assert wrap.file == __file__
    assert "70000 × 65536 = 4587520000" in wrap.text()
    assert int(target) == 70000 * 65536 - 2**32
    sound = LaunchPlan()
    with launching(sound):
        wide_product[(1,)](index, 65536, target)
        product[(1,)](index, 3, target)
    assert not sound.observed.wraps
    assert [launch.text() for launch in sound.observed.launches] == [
        "wide_product[1]",
        "product[1]",
    ]


def test_a_read_outside_is_masked_and_told():
    """A load past the end is recorded; lanes inside are read, lanes outside are 0."""
    memory = torch.arange(1.0, 9.0)
    target = torch.full((8,), -1.0)
    (stray,) = launched(copy, memory[4:], target, 8, SIZE=8).outside.values()
    assert (stray.verb, stray.place) == ("reads", "0 bytes after the end of source")
    assert target.tolist() == [5.0, 6.0, 7.0, 8.0, 0.0, 0.0, 0.0, 0.0]
    assert not launched(copy, memory[4:], target, 4, SIZE=8).outside


@pytest.mark.parametrize("first", ["source", "target"])
def test_one_tensor_is_never_read_in_place_of_another(first):
    """Two tensors that touch in memory: a read past the end of one, or before the other, is outside."""
    memory = bytearray(64)
    halves = [torch.frombuffer(memory, dtype=torch.float32, count=8, offset=at) for at in (0, 32)]
    source, target = halves if first == "source" else halves[::-1]
    source.copy_(torch.arange(1.0, 9.0))
    found = []
    for number in (0, 7):
        with other_outside(number):
            (stray,) = launched(copy, source[4:], target, 8, SIZE=8).outside.values()
        assert stray.place == "0 bytes after the end of source"
        found.append(target.tolist())
    assert found == [[5.0, 6.0, 7.0, 8.0, *[number] * 4] for number in (0, 7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_numbers_outside_depend_on_the_address_alone(dtype):
    """Numbers_outside states those that a kernel loads, in elements from the start of the tensor's memory."""
    source, target = torch.ones(8, dtype=dtype), torch.zeros(64, dtype=dtype)
    with other_outside():
        launched(copy, source, target, 64, SIZE=64)
        expected = numbers_outside(torch.arange(8, 64), dtype)
    assert torch.equal(target[8:], expected)
    assert set(expected.tolist()) == set(range(56, 64))
    assert not torch.equal(expected[:16], expected[16:32])
    with other_outside(7):
        assert set(numbers_outside(torch.arange(-9, 0), dtype).tolist()) == {7}


def test_addresses_depend_on_the_order_of_the_tensors_alone():
    """Views of one storage keep their distance; a stored pointer is valid, too."""
    for _ in range(2):
        one, two = torch.zeros(8), torch.zeros(4)
        memory = Memory({"one": one, "part": one[2:], "two": two})
        assert [memory.address(t) - memory.address(one) for t in (one[2:], two)] == [8, 1 << 44]
        own = np.array([two.data_ptr()], dtype=np.uint64)
        address, mask, stray = memory.inside(own, np.array([True]), 4)
        assert (address.tolist(), mask.tolist(), stray) == (own.tolist(), [True], "")


def test_a_write_outside_is_masked_and_told():
    """The 8th element of a tensor of 7 is not written."""
    target = torch.full((7,), -1.0)
    (stray,) = launched(copy, torch.arange(8.0), target, 8, SIZE=8).outside.values()
    assert stray.verb == "writes"
    assert target.tolist() == list(range(7))


def test_what_two_processes_saw_is_put_together():
    """Merged logs keep the first entry of each line."""
    one, two = RunLog(), RunLog()
    one.multiply(np.array([2**20], dtype=np.int32), np.array([2**20], dtype=np.int32))
    two.stray("reads", "4 bytes before x")
    one.take(two)
    assert len(one.wraps) == len(one.outside) == 1
