"""The model of ROCm's kernel agrees with vLLM's own source, and both are correct.

The source runs on the emulated device. Model and source round at the same places and add float32 numbers
in different orders, so they may differ by twice the bound of each (helpers.bounds). NaN, unwritten rows
and misread indices must be the same in both."""

import functools
from importlib.util import find_spec

import pytest
import torch
from helpers.bounds import bound
from helpers.cases import call_of, decode_rows, hostile, same_bits
from helpers.examples import examples
from helpers.sources import sdist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected
from attnlab.contracts.contract import ROCM_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import model
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.rocm.device import PLAIN, DeviceOptions
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.lab.reference import reference
from attnlab.tensors.cache import make_batch
from attnlab.tensors.call import KernelCall


def real(case: Case, source: Source, how: DeviceOptions = PLAIN) -> KernelCall:
    """Return the call after csrc/rocm's kernel ran."""
    call, _ = call_of(case)
    rocm_source.run(call, Target.of(case), source, how)
    return call


# Compiled kernels, a second each: every GQA ratio, the other fields in turn.
# (num_queries_per_kv, head_size, block_size, dtype, FP8, alibi, platform)
SPECIALISATIONS = tuple(
    (
        group,
        (64, 128)[group % 2],
        (16, 32)[group // 2 % 2],
        ("float16", "bfloat16")[group // 3 % 2],
        group % 4 == 2,
        group % 5 == 3,
        ("gfx90a", "gfx942", "gfx950")[group // 2 % 3],
    )
    for group in range(1, 17)
)


@st.composite
def cases(draw: st.DrawFn, sound: bool = False) -> Case:
    """Draw a small Case for ROCm's kernel, with lengths near the edges of blocks and partitions.

    If ``sound``, it violates no contract.
    """
    special = draw(st.sampled_from(SPECIALISATIONS))
    group, head_size, block_size, dtype, fp8, alibi, platform = special
    edges = st.sampled_from((1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 300, 513))
    count = draw(st.integers(1, 4))
    seq_lens = [draw(edges) for _ in range(count)]
    query_lens = [draw(st.sampled_from((1, 1, 1, 2, 3))) for _ in range(count)]
    query_lens = [min(n, seq_len) for n, seq_len in zip(query_lens, seq_lens, strict=True)]
    stages = ("sound", "cast_after_cumsum")
    if not sound:
        stages += ("int32_before_cumsum", "int64", "wrapper_cast", "fill_decode")
    num_kv_heads = draw(st.integers(1, 2))
    case = Case(
        num_heads=group * num_kv_heads,
        num_queries_per_kv=group,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        kv_cache_dtype=draw(st.sampled_from(("fp8", "fp8_e4m3"))) if fp8 else "auto",
        k_scale=draw(st.sampled_from((1.0, 0.5))),
        v_scale=draw(st.sampled_from((1.0, 2.0))),
        alibi=alibi,
        sm_scale=draw(st.sampled_from((None, 0.1))),
        query_lens=tuple(query_lens),
        ctx_lens=tuple(n - q for n, q in zip(seq_lens, query_lens, strict=True)),
        stage="sound" if sound else draw(st.sampled_from(stages)),
        empty_slots=draw(st.sampled_from(("zeros", "nan", "garbage"))),
        output_init="nan",
        distribution="normal",
        reference_dtype="float64",
        platform=platform,
        seed=draw(st.integers(0, 1000)),
    )
    if sound or not draw(st.booleans()):
        return case
    return case.replace(max_seq_len=draw(st.sampled_from((1, 16, 256, 300, 600))))


def modelled(case: Case) -> KernelCall:
    """Return the call after the model of the kernel ran."""
    call, _ = call_of(case)
    model.run(call, Target.of(case), (ROCM_DECODE,))
    return call


def differences(case: Case, source: Source) -> str:
    """Return where model and source differ, or an empty text."""
    outcomes = []
    for run in (modelled, functools.partial(real, source=source)):
        try:
            outcomes.append(run(case).output.double())
        except KernelRejected as error:
            outcomes.append(str(error))
    one, other = outcomes
    if isinstance(one, str) or isinstance(other, str):
        return "" if isinstance(one, str) and one == other else f"{one} and {other}"
    if not torch.equal(one.isnan(), other.isnan()):
        return f"NaN: {int(one.isnan().sum())} and {int(other.isnan().sum())}"
    apart = (one - other).abs().nan_to_num()
    apart[one == other] = 0.0  # infinities
    over = apart > 2 * bound(case, make_batch(case))
    return f"{int(over.sum())} apart, by up to {float(apart.max())}" if over.any() else ""


SETTINGS = settings(
    max_examples=examples(200),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SETTINGS
@given(case=cases())
def test_model_agrees_with_the_source(rocm: Source, case: Case) -> None:
    """NaN, rows and error texts agree, whatever is wrong with the call."""
    case = case.replace(release=rocm.rules)
    assert decide(case).decode == ROCM_DECODE
    assert differences(case, rocm) == ""


@pytest.mark.parametrize("special", SPECIALISATIONS, ids=str)
def test_source_is_right(rocm: Source, special: tuple[int, int, int, str, bool, bool, str]) -> None:
    """Every row of a well-formed case lies within the derived bound of float64 attention, and a scale
    2 % off does not."""
    group, head_size, block_size, dtype, fp8, alibi, platform = special
    case = hostile(
        num_heads=2 * group,
        num_queries_per_kv=group,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        kv_cache_dtype="fp8" if fp8 else "auto",
        k_scale=0.5,
        v_scale=2.0,
        alibi=alibi,
        platform=platform,
        sm_scale=0.125,
        empty_slots="garbage",
        release=rocm.rules,
    )
    assert worst(real(case, rocm), case) <= 1.0
    if alibi or dtype == "float16":
        assert worst(real(case.replace(sm_scale=0.13), rocm), case) > 1.0


def worst(call: KernelCall, case: Case) -> float:
    """Return the largest error of a decode row relative to its bound."""
    batch = make_batch(case)
    rows = decode_rows(case)
    off = (call.output.double() - reference(case, batch))[rows].abs()
    return float((off / bound(case, batch)[rows]).nan_to_num(nan=torch.inf).max())


@pytest.mark.releases
@pytest.mark.parametrize("fault", ["MFMA4_LAYOUT", "MFMA16_LAYOUT", "SHUFFLE"])
def test_a_wrong_instruction_is_caught(fault: str) -> None:
    """A device with a wrong lane layout or a shuffle off by one exceeds the bound."""
    source = sdist("0.11.2")
    group = 1 if fault == "MFMA4_LAYOUT" else 5
    head_size, block_size, dtype, fp8, _, platform = SPECIALISATIONS[group - 1][1:]
    case = hostile(
        num_heads=group,
        num_queries_per_kv=group,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        platform=platform,
        sm_scale=0.125,
        empty_slots="zeros",
        release="0.11.2",
    )
    assert not fp8
    assert worst(real(case, source), case) <= 1.0
    assert worst(real(case, source, DeviceOptions(faults=(fault,))), case) > 1.0


@pytest.mark.releases
def test_a_dropped_barrier_is_a_race_that_the_order_shows() -> None:
    """The source gives the same bits in every thread order; with one barrier removed it does not."""
    source = sdist("0.11.2")
    case = hostile(
        num_heads=1, num_queries_per_kv=1, head_size=128, empty_slots="zeros", release="0.11.2"
    )
    kernel = (source.root / "csrc/rocm/attention.cu").read_text().splitlines()
    begin = next(i for i, line in enumerate(kernel) if "QKV_mfma4_kernel(" in line)
    barrier = next(i for i in range(begin, len(kernel)) if "__syncthreads();" in kernel[i]) + 1
    orders = [DeviceOptions(order=order) for order in (0, 1, 2, 3)]
    outputs = [real(case, source, how).output for how in orders]
    assert [same_bits(outputs[0], output) for output in outputs[1:]] == [True] * 3
    faults = (f"BARRIER={barrier}",)
    raced = [
        real(case, source, DeviceOptions(order=how.order, faults=faults)).output for how in orders
    ]
    assert not all(same_bits(raced[0], output) for output in raced[1:])


def test_a_lab_runs_the_source_and_says_so(rocm: Source) -> None:
    """Backend rocm: decode rows from the source, prefill rows from the model; the text names both."""
    lab = Lab(source=rocm.path)
    case = hostile(
        backend="rocm", release=rocm.rules, empty_slots="zeros", sm_scale=0.125, atol=1e-2
    )
    result = lab.run(case)
    assert result.status == "match"
    assert result.backend == f"vllm {rocm.version} csrc/rocm, emulated device; prefill: model"
    assert result.memory is None
    on_triton = lab.run(case.replace(platform="sm_90"))
    assert on_triton.backend == "model (the call reaches no kernel of csrc/rocm)"
    rejected = lab.run(case.replace(stage="int64"))
    assert (rejected.status, rejected.error) == (
        "rejected",
        "expected scalar type Int but found Long",
    )


def test_an_output_alone_is_the_sources_too(rocm: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lab.output, which a diagnosis uses, runs the source as Lab.run does."""
    ran = []
    run = rocm_source.run
    monkeypatch.setattr(rocm_source, "run", lambda *args: (ran.append(args), run(*args))[1])
    case = hostile(backend="rocm", platform="gfx942", release=rocm.rules)
    lab = Lab(source=rocm.path)
    output = lab.output(case)
    assert len(ran) == 1
    assert same_bits(output, lab.run(case).call.output)


def test_under_origin_vllm_the_wrapper_calls_the_source(rocm: Source) -> None:
    """With an sdist, ops.paged_attention_rocm runs its source: the same bits as backend rocm."""
    if find_spec("triton") is None:
        pytest.skip("vLLM's wrapper needs the triton extra")
    case = hostile(
        backend="vllm",
        release=rocm.rules,
        sm_scale=0.125,
        query_lens=(1, 1, 2),
        ctx_lens=(40, 300, 3),
    )
    lab = Lab(source=rocm.path)
    result = lab.run(case)
    assert result.backend.endswith("; ROCm decode: csrc/rocm, emulated device")
    on_rdna = case.replace(platform="gfx1100", num_queries_per_kv=3, head_size=128)
    other = lab.run(on_rdna)
    assert other.decision.decode == ROCM_DECODE
    assert other.backend.endswith("; ROCm decode: model")  # waves of 32 are not emulated
    rows = decode_rows(case)
    assert same_bits(
        result.call.output[rows], lab.run(case.replace(backend="rocm")).call.output[rows]
    )


# Known facts about the ROCm kernel, checked on its source.


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block_table_dtype": "int64"}, "expected scalar type Int but found Long"),
        ({"seq_lens_dtype": "int64"}, "expected scalar type Int but found Long"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "Unsupported KV cache dtype: fp8_e5m2"),
        ({"dtype": "float32"}, "Unsupported data type: float"),
        ({"head_size": 96}, "Unsupported head size: 96"),
        ({"block_size": 64}, "Unsupported block size: 64"),
        ({"num_heads": 17, "num_queries_per_kv": 17}, "Unsupported gqa ratio: 17"),
    ],
)
def test_the_host_code_refuses_with_its_own_text(rocm: Source, changes, text: str) -> None:
    """Each host check raises its text and leaves the output unchanged."""
    case = hostile(release=rocm.rules, **changes)
    call, _ = call_of(case)
    before = call.output.clone()
    with pytest.raises(KernelRejected) as caught:
        rocm_source.run(call, Target.of(case), rocm)
    assert str(caught.value) == text
    assert same_bits(call.output, before)


@pytest.mark.parametrize("group", [2, 6])
def test_the_last_blocks_tail_reaches_the_output_through_values_alone(
    rocm: Source, group: int
) -> None:
    """After seq_len, NaN in K changes no bit; NaN in V makes the row NaN in 0.11.2 and changes no bit
    in 0.33.0."""
    special = {"num_heads": group, "num_queries_per_kv": group, "head_size": 64}
    case = hostile(
        query_lens=(1,),
        ctx_lens=(20,),
        release=rocm.rules,
        empty_slots="zeros",
        sm_scale=0.1,
        **special,
    )
    clean = real(case, rocm).output
    for name in ("key_cache", "value_cache"):
        call, cache = call_of(case)
        block, offset = cache.provenance.slot(0, 20)
        after = slice(offset + 1, None)
        tails = {
            "key_cache": (block, ..., after, slice(None)),
            "value_cache": (block, ..., after),
        }
        getattr(call, name)[tails[name]] = float("nan")
        rocm_source.run(call, Target.of(case), rocm)
        poisoned = name == "value_cache" and rocm.rules == "0.11.2"
        assert bool(call.output.isnan().all()) is poisoned
        assert same_bits(call.output, clean) is not poisoned


def test_the_host_code_chooses_its_kernels(rocm: Source) -> None:
    """Up to 4 query heads per KV head use the 4×4 kernel, more use 16×16; then the merge."""
    for group, attention in ((4, "mfma4"), (5, "mfma16")):
        case = hostile(num_heads=group, num_queries_per_kv=group, release=rocm.rules)
        call, _ = call_of(case)
        arguments = rocm_source.op_arguments(call, Target.of(case))
        first, second = rocm_source.op_of(rocm, case.machine).launched(arguments)
        assert first.startswith(f"paged_attention_ll4mi_QKV_{attention}_kernel<_Float16, ")
        assert second == "paged_attention_ll4mi_reduce_kernel<_Float16, _Float16, 64, 64, 256, 1>"


def test_fp8_matrix_cores_average_the_values(rocm: Source) -> None:
    """With mfma_type "fp8", an option, the 16×16 kernel's output is the mean of V: the source divides the
    query by its scale where it means to multiply, and divides the scores by it again, so that all
    weights are alike. The 4×4 kernel knows no such option."""
    for group, averages in ((1, False), (8, True)):
        case = hostile(
            num_heads=group,
            num_queries_per_kv=group,
            head_size=128,
            kv_cache_dtype="fp8",
            query_lens=(1,),
            ctx_lens=(300,),
            empty_slots="zeros",
            release=rocm.rules,
            sm_scale=128**-0.5,
        )
        call, _ = call_of(case)
        arguments = {**rocm_source.op_arguments(call, Target.of(case)), "mfma_type": "fp8"}
        rocm_source.op_of(rocm, case.machine)(arguments)
        batch = make_batch(case)
        mean = batch.value[:301].double().mean(0).repeat_interleave(group, 0)
        to_mean = (call.output[0].double() - mean).abs().max()
        to_attention = (call.output - reference(case, batch)).abs().max()
        # A value times FP8's 1/301, rounded by up to 1/16; attention and mean differ by 0.2.
        assert bool(to_mean < 0.05) is averages
        assert bool(to_attention < 0.05) is not averages
