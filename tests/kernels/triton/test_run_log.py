"""FP8 conversion, int32 overflow and out-of-bounds accesses under the interpreter."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.kernels.triton.run_log import Memory, RunLog, other_outside

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="the interpreter needs the triton extra"
)
FP8 = {
    "float8e4nv": torch.float8_e4m3fn,
    "float8e4b8": torch.float8_e4m3fnuz,
    "float8e5": torch.float8_e5m2,
}


@pytest.fixture
def triton():
    """Provide the lab's interpreted Triton."""
    return interpreter.interpreted_triton()


def kernels(triton):
    """Return kernels of one line each."""
    tl = triton.language

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
    def wide(index, stride: tl.int64, target):
        tl.store(target, tl.load(index) * stride)

    copy.fn.__globals__["tl"] = tl
    return {"copy": copy, "encode": encode, "product": product, "wide": wide}


@pytest.mark.parametrize("dtype", FP8.values(), ids=FP8)
def test_every_fp8_byte_is_decoded(triton, dtype):
    """All 256 bytes decode as in torch, NaN and infinity included."""
    source = torch.arange(256, dtype=torch.uint8).view(dtype)
    target = torch.empty(256)
    kernels(triton)["copy"][(1,)](source, target, 256, SIZE=256)
    torch.testing.assert_close(target, source.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FP8.values(), ids=FP8)
def test_fp8_is_rounded_to_nearest_even_and_saturated(triton, dtype):
    """15.9 becomes 16, not 8; ties round to even; out of range becomes the largest value."""
    limit = torch.finfo(dtype).max
    values = torch.cat([torch.linspace(-20, 20, 1000), torch.tensor([15.9, 1e6, -1e6, 2.0**-9])])
    values = torch.nn.functional.pad(values, (0, 1024 - len(values)))
    target = torch.empty(1024, dtype=dtype)
    kernels(triton)["encode"][(1,)](values, target, SIZE=1024)
    expected = values.clamp(-limit, limit).to(dtype)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    assert float(target[1000]) == 16.0


def test_an_int32_product_that_wraps_is_told(triton):
    """An overflow of int32 × int32 is recorded with its line; a tl.int64 stride records none."""
    index, target = torch.tensor([70000], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    plan = LaunchPlan()
    with launching(plan):
        kernels(triton)["product"][(1,)](index, 65536, target)
    (wrap,) = plan.observed.wraps.values()
    assert (wrap.left, wrap.right) == (70000, 65536)
    assert wrap.file == __file__
    assert "70000 × 65536 = 4587520000" in wrap.text()
    assert int(target) == 70000 * 65536 - 2**32
    sound = LaunchPlan()
    with launching(sound):
        kernels(triton)["wide"][(1,)](index, 65536, target)
        kernels(triton)["product"][(1,)](index, 3, target)
    assert not sound.observed.wraps
    assert [launch.text() for launch in sound.observed.launches] == ["wide[1]", "product[1]"]


def test_a_read_outside_is_masked_and_told(triton):
    """A load past the end is recorded; lanes inside are read, lanes outside are 0."""
    memory = torch.arange(1.0, 9.0)
    target = torch.full((8,), -1.0)
    plan = LaunchPlan()
    with launching(plan):
        kernels(triton)["copy"][(1,)](memory[4:], target, 8, SIZE=8)
    (stray,) = plan.observed.outside.values()
    assert (stray.verb, stray.place) == ("reads", "0 bytes after the end of source")
    assert target.tolist() == [5.0, 6.0, 7.0, 8.0, 0.0, 0.0, 0.0, 0.0]
    masked = LaunchPlan()
    with launching(masked):
        kernels(triton)["copy"][(1,)](memory[4:], target, 4, SIZE=8)
    assert not masked.observed.outside


@pytest.mark.parametrize("first", ["source", "target"])
def test_one_tensor_is_never_read_in_place_of_another(triton, first):
    """Two tensors that touch in memory: a read past the end of one, or before the other, is outside."""
    memory = bytearray(64)
    halves = [torch.frombuffer(memory, dtype=torch.float32, count=8, offset=at) for at in (0, 32)]
    source, target = halves if first == "source" else halves[::-1]
    source.copy_(torch.arange(1.0, 9.0))
    found = []
    for number in (0, 7):
        plan = LaunchPlan()
        with launching(plan), other_outside(number):
            kernels(triton)["copy"][(1,)](source[4:], target, 8, SIZE=8)
        (stray,) = plan.observed.outside.values()
        assert stray.place == "0 bytes after the end of source"
        found.append(target.tolist())
    assert found == [[5.0, 6.0, 7.0, 8.0, *[number] * 4] for number in (0, 7)]


def test_addresses_depend_on_the_order_of_the_tensors_alone():
    """Views of one storage keep their distance; a stored pointer is valid, too."""
    for _ in range(2):
        one, two = torch.zeros(8), torch.zeros(4)
        memory = Memory({"one": one, "part": one[2:], "two": two})
        assert [memory.address(t) - memory.address(one) for t in (one[2:], two)] == [8, 1 << 44]
        own = np.array([two.data_ptr()], dtype=np.uint64)
        address, mask, stray = memory.inside(own, np.array([True]), 4)
        assert (address.tolist(), mask.tolist(), stray) == (own.tolist(), [True], "")


def test_a_write_outside_is_masked_and_told(triton):
    """The 8th element of a tensor of 7 is not written."""
    target = torch.full((7,), -1.0)
    plan = LaunchPlan()
    with launching(plan):
        kernels(triton)["copy"][(1,)](torch.arange(8.0), target, 8, SIZE=8)
    (stray,) = plan.observed.outside.values()
    assert stray.verb == "writes"
    assert target.tolist() == list(range(7))


def test_what_two_processes_saw_is_put_together():
    """Merged logs keep the first entry of each line."""
    one, two = RunLog(), RunLog()
    one.multiply(np.array([2**20], dtype=np.int32), np.array([2**20], dtype=np.int32))
    two.stray("reads", "4 bytes before x")
    one.take(two)
    assert len(one.wraps) == len(one.outside) == 1
