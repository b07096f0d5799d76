"""The model of ROCm's kernel and vLLM's own source of it agree, and both are right.

The source runs on the emulated device. Both sides round at the same places and differ in how float32
sums are ordered, so they may be apart by twice what each may be from exact attention (tests/bounds.py);
where a NaN, an unwritten row or a misread index is, they must be the same.
"""

import functools

import pytest
import torch
from bounds import bound
from conftest import call_of, decode_rows, hostile, same_bits, sdist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlab.batch import make_batch
from attnlab.call import KernelCall
from attnlab.case import Case
from attnlab.dispatch import ROCM_DECODE, Setting, decide
from attnlab.errors import KernelRejected
from attnlab.hip.op import How
from attnlab.kernels import model, rocm_source
from attnlab.kernels.source import Source
from attnlab.reference import reference
from attnlab.run import Lab

# What is compiled: each takes about a second. (num_queries_per_kv, head_size, block_size, dtype, FP8, alibi)
SPECIALISATIONS = (
    (1, 128, 32, "float16", False, False),
    (2, 64, 16, "float16", False, True),
    (3, 128, 16, "bfloat16", False, False),
    (4, 64, 32, "float16", True, False),
    (1, 64, 16, "bfloat16", True, False),
    (5, 128, 16, "float16", False, False),
    (8, 64, 32, "bfloat16", False, True),
    (12, 128, 32, "float16", True, False),
    (16, 64, 16, "float16", False, False),
    (16, 128, 16, "bfloat16", True, True),
)


@st.composite
def cases(draw: st.DrawFn, sound: bool = False) -> Case:
    """Draw a small Case that ROCm's kernel takes, with lengths around the edges of blocks and
    partitions; a ``sound`` one is well formed."""
    group, head_size, block_size, dtype, fp8, alibi = draw(st.sampled_from(SPECIALISATIONS))
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
        empty=draw(st.sampled_from(("zeros", "nan", "garbage"))),
        output="nan",
        data="normal",
        oracle="float64",
        platform=draw(st.sampled_from(("gfx90a", "gfx942", "gfx950"))),
        seed=draw(st.integers(0, 1000)),
    )
    if sound or not draw(st.booleans()):
        return case
    return case.replace(max_seq_len=draw(st.sampled_from((1, 16, 256, 300, 600))))


def real(case: Case, source: Source, how: How = How()) -> KernelCall:
    """Return the call after csrc/rocm's kernel ran."""
    call, _ = call_of(case)
    rocm_source.run(call, Setting.of(case), source, how)
    return call


def modelled(case: Case) -> KernelCall:
    """Return the call after the model of the kernel ran."""
    call, _ = call_of(case)
    model.run(call, Setting.of(case), (ROCM_DECODE,))
    return call


def differences(case: Case, source: Source) -> str:
    """Say where model and source differ, or nothing."""
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
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SETTINGS
@given(case=cases())
def test_model_agrees_with_the_source(rocm: Source, case: Case) -> None:
    """NaN for NaN, row for row and text for text, whatever is wrong with the call."""
    case = case.replace(release=rocm.rules)
    assert decide(case).decode == ROCM_DECODE
    assert differences(case, rocm) == ""
