"""vLLM's unified attention, split-KV attention, merge of partial outputs, and cache write.

The bound on attention is that of tests/test_vllm_agreement.py. A merge rounds each of two parts to the
query's dtype, which that bound has room for: 2 u of the parts, and their weights are exact. A cache write
must give the same bytes.
"""

from typing import Any

import pytest
import torch
from helpers.agreement import agrees, bound, modelled, real
from helpers.cases import hostile, same_bits
from helpers.examples import examples
from helpers.sources import needs_triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import DECODE_FWD, ENCODER, MERGE, OPS, UNIFIED, WRITE
from attnlab.cli.main import main
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels.triton.launch_plan import Subset
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.source import Source
from attnlab.lab.cache_write import slot_order
from attnlab.lab.lab import Lab

pytestmark = needs_triton

FURTHER = (UNIFIED, DECODE_FWD, MERGE, WRITE)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a small Case of one of these ops, with lengths near block edges."""
    op = draw(st.sampled_from(FURTHER))
    block_size = draw(st.sampled_from((8, 16, 32, 64)))
    edge = st.tuples(st.integers(0, 2), st.sampled_from((-1, 0, 1)))
    only_decodes = op == DECODE_FWD or draw(st.booleans())
    ctx_lens, query_lens = [], []
    for _ in range(draw(st.integers(1, 3))):
        blocks, offset = draw(edge)
        ctx_lens.append(max(0, blocks * block_size + offset))
        query_lens.append(1 if only_decodes else draw(st.sampled_from((1, 2, 17))))
    splits = [None] if op in (MERGE, WRITE) else [None, 1, 4] if op == UNIFIED else [None, 1, 3]
    plain = op == DECODE_FWD
    alibi = not plain and draw(st.booleans())
    group = draw(st.integers(1, 8))
    fp8 = draw(st.sampled_from(("auto", "auto", "fp8")))
    scales = (1.0, 0.25)
    return Case(
        op=op,
        num_heads=group * draw(st.integers(1, 2)),
        num_queries_per_kv=group,
        head_size=draw(st.sampled_from((32, 48, 64, 80, 96, 128))),
        block_size=block_size,
        dtype=draw(st.sampled_from(("float16", "float16", "float32"))),
        kv_cache_dtype=fp8,
        k_scale=draw(st.sampled_from(scales)),
        v_scale=draw(st.sampled_from(scales)),
        sliding_window=0 if alibi or plain else draw(st.sampled_from((0, 0, 1, 16))),
        alibi=alibi,
        sinks=op == UNIFIED and draw(st.booleans()),
        softcap=draw(st.sampled_from((None, 0.02, 3.0))) if OPS[op].softcap else None,
        num_splits=draw(st.sampled_from(splits)),
        query_lens=tuple(query_lens),
        ctx_lens=tuple(ctx_lens),
        stage=draw(st.sampled_from(("sound", "sound", "int64"))),
        fill=None if op == WRITE else "all_rows",
        empty_slots=draw(st.sampled_from(("zeros", "nan", "garbage"))),
        platform=draw(st.sampled_from(("sm_90", "gfx942"))),
        distribution="normal",
        output_init="nan",
        seed=draw(st.integers(0, 1000)),
    )


def of_release(case: Case, source: Source) -> Case:
    """Return the Case under the source's rules, without features that the older release lacks."""
    if source.rules == "0.11.2" and case.op == UNIFIED:
        case = case.replace(num_splits=None)
    if source.rules == "0.11.2" and case.op == DECODE_FWD:
        case = case.replace(kv_cache_dtype="auto", x=None)
    return case.replace(release=source.rules)


@settings(
    max_examples=examples(80),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_model_agrees_with_the_real_kernel(source: Source, case: Case) -> None:
    """Attention agrees within the derived bound, NaN for NaN; a cache write byte for byte."""
    case = of_release(case, source)
    mine, theirs = modelled(case).output, real(case, source).output
    if case.op == WRITE:
        assert same_bits(mine, theirs)
    else:
        assert agrees(mine, theirs, bound(case))


def sound(op: str, **changes: Any) -> Case:
    """Return a hostile Case of an op that a correct kernel passes against float64."""
    decodes = {"query_lens": (1,) * 6, "ctx_lens": (0, 15, 16, 17, 255, 300)}
    lens = decodes if op == DECODE_FWD else {}
    tolerance = {} if op == WRITE else {"atol": 4e-3}
    fields = {"op": op, "platform": "sm_90", "backend": "vllm", "num_heads": 2, "sm_scale": 0.125}
    return hostile(**fields | tolerance | lens | changes)


@pytest.mark.parametrize("op", FURTHER)
def test_each_op_is_right(source: Source, op: str) -> None:
    """The ops match the float64 reference with NaN in every unwritten slot."""
    result = Lab(source=source.path).run(sound(op, release=source.rules))
    assert result.status == "match", result.verdict
    assert result.launches
    assert not result.wraps


@pytest.mark.parametrize("op", FURTHER)
def test_the_comparison_sees_a_planted_fault(source: Source, op: str) -> None:
    """The check of every op detects a missing token and a slot with another token's data."""
    lab = Lab(source=source.path)
    case = sound(op, release=source.rules)
    result = lab.run(case)
    assert result.status == "match"
    if op == WRITE:
        one, other = slot_order(case, result.cache.provenance.block_table)[:2].tolist()
        result.call.output[one] = result.call.output[other]
        assert lab.errors(case, result.call, lab.reference(case)).mismatched
        return
    wrong = result.call.output.clone()
    wrong[0] = wrong[1]
    result.call.output.copy_(wrong)
    assert lab.errors(case, result.call, lab.reference(case)).mismatched
    if op != MERGE:  # it reads new tokens from its arguments
        missing = lab.run(case.replace(fill="context_only", empty_slots="zeros"))
        assert missing.status == "mismatch"
        assert {violation.kind for violation in missing.violations} == {"unwritten_slot"}


def test_a_write_to_a_foreign_slot_shows_in_nobodys_rows(source: Source) -> None:
    """A change of an unowned slot is a mismatch in the last "sequence"."""
    lab = Lab(source=source.path)
    case = sound(WRITE, release=source.rules)
    result = lab.run(case)
    free = torch.nonzero(result.cache.provenance.seq.flatten() == -1).flatten()
    owned = torch.cat(
        [
            row[: -(-n // 16)]
            for row, n in zip(
                result.cache.provenance.block_table, case.lengths.seq_lens, strict=True
            )
        ]
    )
    spare = next(int(s) for s in free if int(s) // 16 not in owned.tolist())
    result.call.output[spare] = 1.0
    places = lab.errors(case, result.call, lab.reference(case)).places()
    assert [place.seq for place in places] == [len(case.lengths.query_lens)]


def test_unified_attention_takes_the_path_that_is_asked_for(source: Source) -> None:
    """A batch with a prefill takes the 2D path; decodes take 3D and its merge unless num_splits is 0."""
    lab = Lab(source=source.path)
    case = sound(UNIFIED, release=source.rules)
    assert len(lab.run(case).launches) == 1
    decodes = case.replace(query_lens=(1, 1), ctx_lens=(300, 15), num_blocks=None)
    launches = lab.run(decodes).launches
    assert [name.partition("[")[0] for name in launches][1:] == ["reduce_segments"]
    assert launches[0].endswith(", 16]")
    if source.rules == "0.11.2":
        with pytest.raises(InvalidCase, match="num_splits must be none"):
            lab.run(decodes.replace(num_splits=0))
    else:
        assert len(lab.run(decodes.replace(num_splits=0)).launches) == 1
        assert lab.run(decodes.replace(num_splits=4)).launches[0].endswith(", 4]")


@pytest.mark.parametrize("op", [UNIFIED, DECODE_FWD, "chunked_prefill_paged_decode"])
def test_a_share_of_heads_and_sequences(source: Source, op: str) -> None:
    """The requested part is correct; the rest keeps its bits and counts as not run."""
    case = sound(op, release=source.rules, num_heads=4, kv_head_range=(1, 2), seq_range=(3, 5))
    result = Lab(source=source.path).run(case)
    assert result.status == "match", result.verdict
    assert result.errors is not None
    rows = case.query_rows
    assert rows is not None
    assert result.errors.rows == rows
    assert result.errors.total == len(rows) * 2 * case.head_size
    written = ~result.call.output.isnan().all(-1)
    expected = torch.zeros_like(written)
    expected[rows.start : rows.stop, 2:] = True
    assert torch.equal(written, expected)
    assert "sequences 3 to 4" in result.verdict


def test_a_share_gives_the_bits_of_the_whole(source: Source) -> None:
    """Subsets of heads and sequences together equal the whole call."""
    case = sound(UNIFIED, release=source.rules)
    target, kernels = Target.of(case), decide(case).kernels
    whole, parts = Lab().call(case), Lab().call(case)
    vllm_ops.run(whole, target, kernels, source)
    for seqs in (range(5), range(5, len(case.lengths.query_lens))):
        vllm_ops.run(parts, target, kernels, source, Subset(group=2, seqs=seqs))
    assert same_bits(whole.output, parts.output)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"op": DECODE_FWD}, "query_lens must be 1 everywhere"),
        ({"op": DECODE_FWD, "query_lens": (1,), "ctx_lens": (3,), "alibi": True}, "alibi must be"),
        (
            {"op": DECODE_FWD, "query_lens": (1,), "ctx_lens": (3,), "num_splits": 0},
            "num_splits must be at least 1",
        ),
        ({"num_splits": 2}, "num_splits must be none"),
        ({"op": UNIFIED, "num_splits": 3}, "num_splits must be 0 or a power of two"),
        (
            {"op": ENCODER, "query_lens": (3,), "ctx_lens": (0,), "kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype must be one of auto with",
        ),
        (
            {"op": WRITE, "backend": "vllm", "seq_range": (0, 1)},
            "seq_range must be none with reshape",
        ),
        ({"backend": "vllm", "seq_range": (0, 99)}, "seq_range must be at most 0:12"),
        ({"seq_range": (0, 1)}, "seq_range must be none with backend model"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    """The error is one line that names the field."""
    with pytest.raises(InvalidCase, match=words):
        hostile(**changes)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_unified_attention_reads_a_cache_of_e5m2(source: Source, scale: float) -> None:
    """Its code has no list of formats: what the cache's dtype is decides."""
    scales = {"k_scale": scale, "v_scale": scale}
    case = hostile(
        op=UNIFIED, backend="vllm", release=source.rules, kv_cache_dtype="fp8_e5m2", **scales
    )
    assert Lab(source=source.path).run(case).status == "match"


def test_an_op_that_takes_an_fp8_cache_without_its_scales_is_wrong(source: Source) -> None:
    """0.11.2's decode_attention_fwd accepts an FP8 cache and has no argument for its scales."""
    case = sound(DECODE_FWD, release=source.rules, kv_cache_dtype="fp8", k_scale=0.5, atol=0.1)
    expected = "mismatch" if source.rules == "0.11.2" else "match"
    assert Lab(source=source.path).run(case).status == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
@pytest.mark.parametrize("command", ["run", "diagnose"])
def test_a_gpu_that_is_not_there_is_told(
    source: Source,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--device cuda without a GPU: one line and exit code 2, for every command."""
    flags = ["--backend", "vllm", "--device", "cuda", "--release", str(source.rules)]
    assert main([command, *flags, "--source", str(source.path)]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
