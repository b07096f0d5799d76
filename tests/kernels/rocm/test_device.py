"""The emulated device's instructions against the definitions of AMD's instruction set documents.

Each is computed here a second time, by element and in float64, from the documents' tables of which lane
holds which element. The operands are small integers, so that every sum is exact in any order.
"""

import ctypes
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlab.case.errors import Unavailable
from attnlab.kernels.rocm import device as emulated
from attnlab.kernels.rocm.device import find_compiler

WAVE = 64
# enum Operation of cpp/device.h
MATRIX = {
    "4x4x1 f32": (0, 4, 1, "float32"),
    "4x4x4 f16": (1, 4, 4, "float16"),
    "4x4x4 bf16": (2, 4, 4, "bfloat16"),
    "16x16x16 f16": (3, 16, 16, "float16"),
    "16x16x16 bf16": (4, 16, 16, "bfloat16"),
    "16x16x32 fp8 fnuz": (5, 16, 32, "float8_e4m3fnuz"),
    "16x16x32 fp8 ocp": (6, 16, 32, "float8_e4m3fn"),
}
ROW_ROR, BPERMUTE, SHFL_XOR, SHFL_DOWN = 7, 8, 9, 10


@pytest.fixture(scope="module")
def device() -> ctypes.CDLL:
    """Provide the device; skip if there is no compiler."""
    try:
        find_compiler(os.environ.get("CXX"))
    except Unavailable as error:
        pytest.skip(str(error))
    return emulated.device()


def packed(values: torch.Tensor, dtype: str) -> np.ndarray:
    """Return [64, n] values as the 8-byte registers of 64 lanes."""
    bits = values.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().reshape(WAVE, -1)
    return np.ascontiguousarray(np.pad(bits, ((0, 0), (0, 8 - bits.shape[1])))).view(np.uint64)


def matrix(
    device: ctypes.CDLL, operation: int, a, b, c, cbsz: int = 0, abid: int = 0
) -> np.ndarray:
    """Return D, [64, 4], of a matrix instruction."""
    d = np.zeros((WAVE, 4), np.float32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, c, d)]
    device.attnlab_matrix(operation, *pointers, cbsz, abid)
    return d


@pytest.mark.parametrize("name", [name for name in MATRIX if name.startswith("16")])
@pytest.mark.parametrize("seed", [0, 1])
def test_16x16(device: ctypes.CDLL, name: str, seed: int) -> None:
    """A[i][k] and B[k][j] lie in lane 16·(k // n) + i or j, element k % n, n = K / 4; D[i][j] in lane
    16·(i // 4) + j, register i % 4."""
    operation, _, size, dtype = MATRIX[name]
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randint(-7, 8, (16, size), generator=generator).float() for _ in range(2))
    start = torch.randint(-9, 9, (16, 16), generator=generator).float()
    expected = start.double() + left.double() @ right.double().T
    per = size // 4
    a, b, c = torch.zeros(WAVE, per), torch.zeros(WAVE, per), np.zeros((WAVE, 4), np.float32)
    for i in range(16):
        for k in range(size):
            a[16 * (k // per) + i, k % per] = left[i, k]
            b[16 * (k // per) + i, k % per] = right[i, k]
        for j in range(16):
            c[16 * (i // 4) + j, i % 4] = start[i, j]
    d = matrix(device, operation, packed(a, dtype), packed(b, dtype), c)
    got = [[d[16 * (i // 4) + j, i % 4] for j in range(16)] for i in range(16)]
    assert got == expected.tolist()


@pytest.mark.parametrize("name", [name for name in MATRIX if name.startswith("4")])
@pytest.mark.parametrize(("cbsz", "abid"), [(0, 0), (4, 0), (4, 9), (4, 15), (2, 3), (1, 1)])
def test_4x4(device: ctypes.CDLL, name: str, cbsz: int, abid: int) -> None:
    """Block n of 16 lies in lanes 4n … 4n+3; A[i] in lane 4n+i, B[.][j] and D[.][j] in lane 4n+j. With
    cbsz, the blocks of each group of 2^cbsz take A from the group's block number abid."""
    operation, _, size, dtype = MATRIX[name]
    generator = torch.Generator().manual_seed(cbsz * 16 + abid)
    left, right = (
        torch.randint(-9, 9, (16, 4, size), generator=generator).float() for _ in range(2)
    )
    start = torch.randint(-9, 9, (16, 4, 4), generator=generator).float()  # block, i, j
    group = 2**cbsz
    sources = [n // group * group + abid if cbsz else n for n in range(16)]
    expected = start + left[sources] @ right.transpose(1, 2)
    c = np.ascontiguousarray(start.transpose(1, 2).reshape(WAVE, 4).numpy())
    a, b = (packed(t.reshape(WAVE, size), dtype) for t in (left, right))
    d = matrix(device, operation, a, b, c, cbsz, abid)
    assert d.reshape(16, 4, 4).transpose(0, 2, 1).tolist() == expected.tolist()


def test_a_matrix_instruction_spreads_nan_over_its_column_or_row_alone(device: ctypes.CDLL) -> None:
    """One NaN in A makes exactly row i of D NaN, also when multiplied by 0."""
    a = torch.ones(WAVE, 4)
    a[16 * 2 + 5, 1] = float("nan")  # A[5][9]
    zeros = np.zeros((WAVE, 4), np.float32)
    d = matrix(device, 3, packed(a, "float16"), packed(torch.zeros(WAVE, 4), "float16"), zeros)
    rows = {16 * (5 // 4) + j for j in range(16)}
    assert {(int(lane), int(v)) for lane, v in np.argwhere(np.isnan(d))} == {(r, 1) for r in rows}


@pytest.mark.parametrize("n", [4, 8, 1, 15])
def test_row_ror(device: ctypes.CDLL, n: int) -> None:
    """Within each row of 16, lane i receives the value of lane (i - n) mod 16."""
    for lane in range(WAVE):
        rotated = np.roll(np.arange(lane // 16 * 16, lane // 16 * 16 + 16), n)
        assert device.attnlab_source(ROW_ROR, lane, n, 64) == rotated[lane % 16]


def test_bpermute(device: ctypes.CDLL) -> None:
    """The address is in bytes, four per lane, modulo 256."""
    for lane, address in [(0, 0), (5, 4), (9, 252), (9, 256), (1, 259), (3, 1024 + 40)]:
        assert device.attnlab_source(BPERMUTE, lane, address, 64) == address // 4 % 64


@given(lane=st.integers(0, 63), mask=st.sampled_from((1, 2, 4, 8, 16, 32)), log=st.integers(1, 6))
def test_shuffles(device: ctypes.CDLL, lane: int, mask: int, log: int) -> None:
    """__shfl_xor and __shfl_down stay in segments of ``width`` lanes; for a source past the segment the lane
    keeps its value. (HIP's __shfl_xor can reach a lower segment; with mask < width it does not.)"""
    width = 2**log
    if mask < width:
        assert device.attnlab_source(SHFL_XOR, lane, mask, width) == lane ^ mask
    inside = lane % width + mask < width
    assert device.attnlab_source(SHFL_DOWN, lane, mask, width) == (lane + mask if inside else lane)


@pytest.mark.parametrize(("ocp", "dtype"), [(1, torch.float8_e4m3fn), (0, torch.float8_e4m3fnuz)])
def test_fp8_bytes(device: ctypes.CDLL, ocp: int, dtype: torch.dtype) -> None:
    """All 256 bytes decode as in torch."""
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    got = np.array([device.attnlab_fp8_to_float(ocp, byte) for byte in range(256)], np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("ocp", "dtype"), [(1, torch.float8_e4m3fn), (0, torch.float8_e4m3fnuz)])
@given(value=st.floats(-500, 500, width=32))
def test_to_fp8(device: ctypes.CDLL, ocp: int, dtype: torch.dtype, value: float) -> None:
    """Values round to nearest, ties to even; beyond the largest value the result is NaN."""
    byte = torch.tensor([device.attnlab_float_to_fp8(ocp, value)], dtype=torch.uint8).view(dtype)
    finite = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    finite = finite[finite.isfinite()]
    largest = float(finite.max())
    step = largest - float(finite[finite < largest].max())
    if abs(value) >= largest + step / 2:
        assert byte.float().isnan()
    else:
        distance = (finite - value).abs()
        nearest = finite[distance == distance.min()].unique()
        assert float(byte.double()) in nearest
        if len(nearest) == 2:
            assert int(byte.view(torch.uint8)) % 2 == 0


@given(value=st.floats(width=32, allow_nan=False))
def test_bfloat16_and_rtz(device: ctypes.CDLL, value: float) -> None:
    """bfloat16 rounds as in torch; v_cvt_pkrtz rounds towards zero."""
    tensor = torch.tensor([value])
    assert device.attnlab_float_to_bf16(value) == int(tensor.bfloat16().view(torch.uint16))
    cut = torch.tensor([device.attnlab_float_to_f16_rtz(value)], dtype=torch.uint16).view(
        torch.float16
    )
    nearest = tensor.half()
    assert abs(float(cut)) <= abs(value)
    if nearest.isfinite().all() and abs(float(nearest)) <= abs(value):
        assert torch.equal(cut, nearest)
    elif nearest.isfinite().all():
        assert int(cut.view(torch.int16)) == int(nearest.view(torch.int16)) - 1
