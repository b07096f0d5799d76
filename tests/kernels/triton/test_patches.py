"""bfloat16 under the lab's interpreter: every operation as torch computes it, and never the raw bits."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.saved_calls import call_of
from helpers.sources import needs_triton, of_release
from helpers.triton_example import planted
from threadpoolctl import threadpool_info, threadpool_limits

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.checker.case_check import case_verdict
from attnlab.checker.case_run import lab_of
from attnlab.checker.check import backend_of
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.kernels import find_backend
from attnlab.kernels.triton import interpreter, patches
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.lab.lab import Lab
from attnlab.tensors.call import STOCK_BFLOAT16

pytestmark = needs_triton
if find_spec("triton") is not None:
    triton = interpreter.interpreted_triton()
    tl = triton.language

    @triton.jit
    def elementwise(a, b, out, whole, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        x, y = tl.load(a + at), tl.load(b + at)
        few = tl.load(a + at, mask=at < 5, other=1.1)
        tl.store(out + at, x + y)
        tl.store(out + SIZE + at, x * y)
        tl.store(out + 2 * SIZE + at, x / y)
        tl.store(out + 3 * SIZE + at, tl.where(x > y, x, 1.1))
        tl.store(out + 4 * SIZE + at, tl.abs(x) - y)
        tl.store(out + 5 * SIZE + at, few)
        tl.store(out + 6 * SIZE + at, tl.maximum(x, y))
        tl.store(out + 7 * SIZE + at, -tl.full([SIZE], 0.1, tl.bfloat16))
        tl.store(whole + at, x.to(tl.float32))
        tl.store(whole + SIZE + at, x.to(tl.float16))
        tl.store(whole + 2 * SIZE + at, x.to(tl.int32))
        tl.store(whole + 3 * SIZE + at, x.to(tl.int16, bitcast=True))
        tl.store(whole + 4 * SIZE + at, x.to(tl.int16, bitcast=True).to(tl.bfloat16, bitcast=True))
        tl.store(whole + 5 * SIZE + at, x.to(tl.float8e4nv).to(tl.bfloat16))
        tl.store(whole + 6 * SIZE + at, (x.to(tl.float32) / 3).to(tl.bfloat16))
        tl.store(whole + 7 * SIZE + at, tl.max(x, 0))

    @triton.jit
    def product(a, b, out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        square = at[:, None] * SIZE + at[None, :]
        tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square)))

    @triton.jit
    def added(out, value):
        tl.atomic_add(out, tl.load(value))

    @triton.jit
    def combined(both, either, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        inside = at >= 2 and at < 5
        outside = at < 2 or at >= 5 or at == 3
        tl.store(both + at, inside.to(tl.int32))
        tl.store(either + at, outside.to(tl.int32))

    @triton.jit
    def chained(out, pointer, NONE: tl.constexpr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        inside = 2 <= at < 5
        tl.store(out + at, inside.to(tl.int32) + (0 < at <= at != 3).to(tl.int32))
        if 1 < NONE < tl.load(pointer):
            tl.store(out, 9)

    @triton.jit
    def skipped(out, pointer, FLAG: tl.constexpr):
        if FLAG and tl.load(pointer) > 0:
            tl.store(out, 1)
        if not FLAG or tl.load(pointer) > 0:
            tl.store(out + 1, 1)


def run(kernel, *args, **sizes) -> None:
    with launching(LaunchPlan()):
        kernel[(1,)](*args, **sizes)


def test_each_operation_is_that_of_torch() -> None:
    """A result that is rounded twice, or not to nearest even, differs in a bit of some of 64 numbers."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 64).bfloat16()
    out, whole = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(8, 64)
    run(elementwise, a, b, out, whole, SIZE=64)
    tenth = torch.tensor(1.1).bfloat16()
    expected = [
        a + b, a * b, (a.float() / b.float()).bfloat16(), torch.where(a > b, a, tenth), a.abs() - b,
        torch.where(torch.arange(64) < 5, a, tenth), torch.maximum(a, b),
        torch.full((64,), -0.1).bfloat16(),
    ]  # fmt: skip
    for number, row in enumerate(expected):
        assert torch.equal(out[number], row), number
    bits = a.view(torch.int16).float()
    others = [
        a, a.half(), a.int(), bits, a, a.float().to(torch.float8_e4m3fn), (a.float() / 3).bfloat16(),
        a.max().expand(64),
    ]  # fmt: skip
    for number, row in enumerate(others):
        assert torch.equal(whole[number], row.float()), number


def test_a_dot_product_adds_in_float32() -> None:
    """The products of bfloat16 numbers are exact in float32; their sum is not rounded to bfloat16."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16).bfloat16()
    out = torch.zeros(16, 16)
    run(product, a, b, out, SIZE=16)
    exact = a.double() @ b.double()
    assert (out.double() - exact).abs().max() < 2e-5
    assert not torch.equal(out, out.bfloat16().float())


def test_linear_algebra_of_a_kernel_has_one_thread(monkeypatch) -> None:
    """And as many as before after the launch; several for a tile made a diagnosis five times as slow."""
    matmul, seen = np.matmul, []

    def threads() -> set[int]:
        return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

    def noting(*args, **named):
        seen.append(threads())
        return matmul(*args, **named)

    monkeypatch.setattr(np, "matmul", noting)
    with threadpool_limits(limits=2, user_api="blas"):
        run(product, *torch.zeros(2, 16, 16), torch.zeros(16, 16), SIZE=16)
        assert (seen, threads()) == ([{1}] * len(seen), {2})
    assert seen


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, 3.3e38, -1e-40])
def test_special_numbers(value: float) -> None:
    """NaN stays NaN; what is too large for bfloat16 becomes infinite; subnormal numbers are kept."""
    numbers = torch.full((64,), value)
    stored = torch.from_numpy(patches.encoded(numbers.numpy()).view("int16")).view(torch.bfloat16)
    assert torch.equal(stored.nan_to_num(1.0), numbers.bfloat16().nan_to_num(1.0))
    assert torch.equal(stored.isnan(), numbers.isnan())
    back = torch.from_numpy(patches.decoded(stored.view(torch.int16).numpy().view("uint16")))
    assert torch.equal(back.nan_to_num(1.0), stored.float().nan_to_num(1.0))


def test_rounding_is_to_nearest_even() -> None:
    """All ties of 256 neighbours, and truncation where a kernel asks for it."""
    bits = torch.arange(0x3F80, 0x4080, dtype=torch.int32)
    for half in (0x7FFF, 0x8000, 0x8001):
        numbers = ((bits << 16) + half).view(torch.float32)
        found = torch.from_numpy(patches.rounded(numbers.numpy()))
        assert torch.equal(found, numbers.bfloat16().float())
        truncated = torch.from_numpy(patches.truncated(numbers.numpy()))
        assert torch.equal(truncated, (bits << 16).view(torch.float32))


def test_what_is_not_computed_is_not_run() -> None:
    """An atomic operation on bfloat16 is no verdict about the kernel."""
    with pytest.raises(Unavailable, match="atomic operations on bfloat16"):
        run(added, *torch.ones(2, 1, dtype=torch.bfloat16))


BASE = Case(
    backend="vllm", platform="sm_90", fill="all_rows", num_heads=4, num_queries_per_kv=2,
    head_size=32, block_size=16, query_lens=(1, 5, 17), ctx_lens=(31, 16, 2), num_blocks=12,
    distribution="normal", empty_slots="nan", output_init="nan", reference_dtype="float64",
)  # fmt: skip
OPS = {
    "chunked_prefill_paged_decode": {},
    "context_attention_fwd": {"query_lens": (3, 5, 17)},
    "unified_attention": {},
    "unified_attention, split": {"query_lens": (1, 1, 1)},
    "decode_attention_fwd": {"query_lens": (1, 1, 1)},
}


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.33.0", "0.11.2"])
@pytest.mark.parametrize("name", OPS)
def test_vllms_kernels_are_within_the_bound(name: str, release: str) -> None:
    """Each op matches the float64 reference within its rounding bound, as in float16."""
    backend = backend_of(source=of_release(release).root)
    lab = lab_of(backend, "cpu")
    case = BASE.replace(op=name.partition(",")[0], release=release, sm_scale=0.2, **OPS[name])
    for dtype in ("bfloat16", "float16"):
        verdict = case_verdict(lab, backend, case.replace(dtype=dtype))
        wrong = [one for one in verdict["findings"] if one["kind"] in ("wrong_output", "fails")]
        assert verdict["ran"], verdict
        assert not wrong, (dtype, wrong)


def test_a_call_of_the_stock_interpreter_is_not_decided() -> None:
    """A diagnosis of its output would accuse the kernel; one of another output is possible."""
    call = call_of()
    origin = dataclasses.replace(call.origin, backend=STOCK_BFLOAT16)
    found = diagnose_captured(dataclasses.replace(call, origin=origin), Case())
    assert found.status == "not decided"
    assert found.sentences()[0].startswith("not decided: bfloat16 under Triton's interpreter")


def test_a_call_of_the_stock_interpreter_is_diagnosed_with_its_kernel(tmp_path: Path) -> None:
    """attnlab's interpreter computes the output anew, right or wrong."""
    for new in ("first // BLOCK).to", "first % BLOCK).to"):
        case, _ = planted(tmp_path, "first // BLOCK).to", new)
        call = Lab().call(
            case.replace(dtype="bfloat16", query_lens=(1, 2), ctx_lens=(40, 9), num_blocks=None)
        )
        origin = dataclasses.replace(call.origin, backend=STOCK_BFLOAT16)
        call = dataclasses.replace(call, origin=origin)
        found = diagnose_captured(call, Case(), runner=find_backend(case.backend), limit=None)
        assert found.is_wrong == ("%" in new)
        assert found.diagnosed.endswith(
            "the recorded one is of bfloat16 under Triton's interpreter"
        )


# ``and`` and ``or`` of blocks under the interpreter: element by element, as Triton compiles them.


def test_blocks_are_combined():
    both, either = torch.zeros(2, 8, dtype=torch.int32).unbind()
    run(combined, both, either, SIZE=8)
    assert both.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    assert either.tolist() == [1, 1, 0, 1, 0, 1, 1, 1]


def test_chained_comparisons_of_blocks():
    """Python would keep the last comparison alone; a constant that is false ends the chain."""
    out = torch.zeros(8, dtype=torch.int32)
    run(chained, out, None, NONE=0, SIZE=8)
    assert out.tolist() == [0, 1, 2, 1, 2, 1, 1, 1]


def test_the_second_operand_of_scalars_may_be_skipped():
    """A constexpr condition protects an operand that cannot be computed."""
    out = torch.zeros(2, dtype=torch.int32)
    run(skipped, out, None, FLAG=False)
    assert out.tolist() == [0, 1]


# Functions of the language that a module has under a name of its own, and those of a GPU's library.


tl_log2 = own_tanh = None  # names that a run gives the kernel's module
NUMBERS = torch.tensor([0.25, 0.5, 1.0, 3.0])


def run_kernel(lockstep: bool):
    """Return what the alias of a function, and functions of libdevice, compute of NUMBERS."""
    triton = interpreter.interpreted_triton()
    from triton.language.extra import libdevice as general

    tl = triton.language

    @triton.jit
    def kernel(x, out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        number = tl.load(x + at)
        tl.extra.cuda.gdc_wait()
        tl.store(out + at, tl_log2(number))
        tl.store(out + SIZE + at, own_tanh(number))
        tl.store(out + 2 * SIZE + at, tl.extra.cuda.libdevice.fast_expf(number))
        tl.store(out + 3 * SIZE + at, general.pow(number, number + 1))

    names = {"tl": tl, "tl_log2": tl.log2, "own_tanh": tl.extra.cuda.libdevice.tanh}
    kernel.fn.__globals__.update(names, general=general)
    out = torch.zeros(4, 4)
    with interpreter.interpret(lockstep=lockstep), launching(LaunchPlan()):
        kernel[(1,)](NUMBERS, out, SIZE=4)
    return out


@pytest.mark.parametrize("lockstep", [True, False])
def test_aliases_and_libdevice_compute_what_their_names_say(lockstep):
    expected = [NUMBERS.log2(), NUMBERS.tanh(), NUMBERS.exp(), NUMBERS.pow(NUMBERS + 1)]
    torch.testing.assert_close(run_kernel(lockstep), torch.stack(expected))


def test_a_function_of_the_library_that_is_not_known_is_refused(monkeypatch):
    """A planted gap: no function may return what another computes."""
    monkeypatch.delitem(patches._LIBDEVICE, "tanh")
    with pytest.raises(Unavailable, match=r"^__nv_tanhf .* is not interpreted$"):
        run_kernel(lockstep=False)


def test_without_the_aliases_a_module_fails(monkeypatch):
    monkeypatch.setattr(patches, "bind_aliases", lambda *args: None)
    with pytest.raises(Exception, match=r"Did you forget to add @triton\.jit"):
        run_kernel(lockstep=False)
