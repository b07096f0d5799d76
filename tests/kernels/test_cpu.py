"""Backend vllm-cpu: agreement with float64, refusals, and reads after the end of a sequence."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch
from helpers.bounds import bound
from helpers.cases import call_of, decode_rows, hostile, same_bits
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, KernelRejected, Unavailable
from attnlab.case.ops import CPU_ATTENTION
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import find_violations
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import cpu as cpu_ops
from attnlab.lab.lab import Lab
from attnlab.lab.reference import reference
from attnlab.tensors.cache import make_batch


def is_installed() -> bool:
    """Answer whether the required release is installed."""
    try:
        return importlib.metadata.version(cpu_ops.DISTRIBUTION) == cpu_ops.VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


needs_op = pytest.mark.skipif(not is_installed(), reason="needs vllm-cpu 0.32.0, the vllm extra")


def on_cpu(**changes) -> Case:
    """Return the hostile Case for the CPU op, with finite numbers in unwritten slots."""
    fields = {
        "op": CPU_ATTENTION,
        "backend": "vllm-cpu",
        "platform": "cpu",
        "empty_slots": "garbage",
    }
    return hostile(**{**fields, **changes})


def ran(case: Case) -> torch.Tensor:
    """Return the op's output."""
    call, _ = call_of(case)
    cpu_ops.run(call, Target.of(case))
    return call.output


def agrees(case: Case, output: torch.Tensor) -> bool:
    """Answer whether every element is within the derived bound of exact attention."""
    batch = make_batch(case)
    error = (output.double() - reference(case, batch).double()).abs()
    return bool((error <= bound(case, batch)).all())


@st.composite
def cases(draw) -> Case:
    """Draw a small Case: ratios, sizes, windows, lengths around the edges of blocks and of 16 and 32."""
    group, alibi = draw(st.integers(1, 9)), draw(st.booleans())
    block_size = draw(st.sampled_from((16, 32, 48, 64, 128)))
    ctx_lens, query_lens = [], []
    for _ in range(draw(st.integers(1, 4))):
        step = draw(st.sampled_from((16, 32, block_size)))
        edge = draw(st.integers(0, 4)) * step + draw(st.sampled_from((-1, 0, 1)))
        query_lens.append(draw(st.sampled_from((1, 1, 2, 17, 40))))
        ctx_lens.append(max(0, edge - draw(st.sampled_from((0, query_lens[-1])))))
    return on_cpu(
        num_heads=group * draw(st.integers(1, 3)),
        num_queries_per_kv=group,
        head_size=draw(st.sampled_from((32, 48, 64, 80, 96, 112, 128, 256))),
        block_size=block_size,
        query_lens=tuple(query_lens),
        ctx_lens=tuple(ctx_lens),
        dtype=draw(st.sampled_from(("float16", "bfloat16", "float32"))),
        alibi=alibi,
        sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from((None, None, 0.7, 3.0))),
        sliding_window=0 if alibi else draw(st.sampled_from((0, 0, 1, 2, 16, 33))),
        sm_scale=draw(st.sampled_from((None, 0.3))),
        stage=draw(st.sampled_from(("sound", "wrapper_cast"))),
        fill="all_rows",
        **({} if draw(st.booleans()) else {"num_blocks": None}),  # spare blocks, or none
        seed=draw(st.integers(0, 999)),
    )


@needs_op
@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(case=cases())
def test_the_op_agrees_with_float64(case: Case) -> None:
    """Errors are within the derived bound; finite numbers in unwritten slots change no bit."""
    output = ran(case)
    assert agrees(case, output)
    assert same_bits(output, ran(case.replace(empty_slots="zeros")))


@needs_op
@pytest.mark.parametrize("num_heads", [2, 6])
def test_a_cache_of_one_block(num_heads: int) -> None:
    """Strides of dimensions of size 1 do not reach the op."""
    case = on_cpu(query_lens=(1,), ctx_lens=(0,), num_blocks=None, num_heads=num_heads)
    assert case.total_blocks == 1
    assert agrees(case, ran(case))


@needs_op
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_bound_is_tight_enough(dtype: str) -> None:
    """Each small fault, such as a scale that is 2 % off, exceeds the bound."""
    case = on_cpu(dtype=dtype, sm_scale=0.125, sliding_window=20, sinks=True, softcap=2.0)
    assert agrees(case, ran(case))
    for changes in (
        {"sinks": False},
        {"softcap": 2.1},
        {"sm_scale": 0.1275},
        {"sliding_window": 19},
        {"fill": "context_only", "empty_slots": "zeros"},
    ):
        assert not agrees(case, ran(case.replace(**changes)))


@needs_op
def test_nan_after_the_end_reaches_the_output_through_values_alone() -> None:
    """NaN in keys of the tail changes no bit. NaN in values gives NaN in rows that end before a multiple
    of 32. The op does not read blocks without an owner."""
    case = on_cpu(block_size=64, num_blocks=None, empty_slots="nan")
    call, _ = call_of(case)
    cpu_ops.run(call, Target.of(case))
    last = torch.tensor(case.query_lens).cumsum(0) - 1
    ends = torch.tensor([seq_len % 32 == 0 for seq_len in case.lengths.seq_lens])
    assert torch.equal(call.output.isnan().flatten(1).any(1)[last], ~ends)
    assert ends.any()

    clean = ran(case.replace(empty_slots="zeros"))
    call.value_cache.nan_to_num_(0.0)
    assert call.key_cache.isnan().any()
    cpu_ops.run(call, Target.of(case))
    assert same_bits(call.output, clean)


@needs_op
@pytest.mark.parametrize("name", ["block_table", "seq_lens", "query_start_loc"])
def test_each_int64_index_tensor_is_rejected(name: str) -> None:
    """The op checks all three, including query_start_loc, and writes nothing."""
    case = on_cpu(**{f"{name}_dtype": "int64"})
    call, cache = call_of(case)
    violations = find_violations(call, Target.of(case), decide(case).kernels, cache.provenance)
    assert [(b.effect, b.tensor) for b in violations if b.kind == "index_dtype"] == [
        ("rejected", name)
    ]
    with pytest.raises(KernelRejected, match=r"^expected scalar type Int but found Long$"):
        cpu_ops.run(call, Target.of(case))
    assert call.output.isnan().all()


@needs_op
@pytest.mark.parametrize("head_size", [16, 24, 48, 64, 72, 112, 320])
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 48])
def test_violations_predict_rejections(head_size: int, block_size: int) -> None:
    """The op raises if and only if the contract has a violation for its sizes."""
    case = on_cpu(head_size=head_size, block_size=block_size, query_lens=(2, 1), ctx_lens=(9, 30))
    result = Lab().run(case.replace(num_blocks=None, atol=1e-2))
    foretold = any(b.effect == "rejected" for b in result.violations)
    assert foretold is (result.status == "rejected")
    assert "[F" not in result.verdict


@needs_op
def test_every_new_token_comes_from_the_cache() -> None:
    """Sequences whose new tokens are not in the cache have wrong rows."""
    case = on_cpu(empty_slots="zeros", atol=1e-2, num_blocks=None)
    lacking = {}
    for fill in ("context_only", "decode_rows", "all_rows"):
        result = Lab().run(case.replace(fill=fill))
        lacking[fill] = sum(b.kind == "unwritten_slot" for b in result.violations)
        assert result.status == ("match" if fill == "all_rows" else "mismatch")
        if fill == "decode_rows":
            assert not {place.seq for place in result.places()} & {
                i for i, length in enumerate(case.query_lens) if length == 1
            }
    decodes = case.query_lens.count(1)
    assert lacking == {
        "context_only": len(case.query_lens),
        "decode_rows": len(case.query_lens) - decodes,
        "all_rows": 0,
    }
    assert decode_rows(case).sum() == decodes


@needs_op
def test_the_result_names_its_backend() -> None:
    """A second Case shares the batch and the reference of the first."""
    lab, case = Lab(), on_cpu(atol=1e-2)
    first = lab.run(case)
    assert first.backend == "vllm-cpu 0.32.0, compiled for CPU"
    assert first.decision.reasons == [f"{CPU_ATTENTION} is called directly: nothing is dispatched"]
    assert lab.run(case.replace(fill="decode_rows")).shared == ("batch", "reference")


@needs_op
def test_only_the_library_is_loaded() -> None:
    """No Python module of vLLM is imported; the library can be loaded again afterwards."""
    code = (
        "import sys; from attnlab.kernels import cpu as cpu_ops; cpu_ops.load();"
        "assert not [m for m in sys.modules if m.partition('.')[0] == 'vllm'];"
        "cpu_ops.torch.ops.load_library(cpu_ops.library_path()); cpu_ops.load.__wrapped__()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@needs_op
def test_its_soft_cap_overflows() -> None:
    """A score beyond 88 times the cap becomes NaN, as in Triton's op before vLLM PR #56579.

    The library for processors without AVX-512 has another tanh, which does not overflow.
    """
    case = on_cpu(softcap=0.02, num_blocks=None)
    diagnosis = diagnose(case, ran(case), propose=False)
    if cpu_ops.library_name() == "_C_AVX2.abi3.so":
        assert diagnosis.status == "nothing wrong"
        return
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == ("softcap_overflows", "all")
    assert diagnose(case.replace(softcap=2.0), propose=False).status == "nothing wrong"


@needs_op
def test_an_fp8_cache_is_refused() -> None:
    """The op supports an FP8 cache, but the lab does not write one for it."""
    case = on_cpu(kv_cache_dtype="fp8", query_lens=(1,), ctx_lens=(20,), num_blocks=None)
    call, _ = call_of(case)
    with pytest.raises(Unavailable, match="kv_cache_dtype must be auto with backend vllm-cpu"):
        cpu_ops.run(call, Target.of(case))


def test_a_missing_package_is_unavailable(monkeypatch) -> None:
    """One line for: no package, another release, another processor, no library."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Unavailable, match=r"pip install 'attnlab\[vllm\]'"):
        cpu_ops.load.__wrapped__()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.0")
    with pytest.raises(Unavailable, match=r"0\.31\.0"):
        cpu_ops.load.__wrapped__()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: cpu_ops.VERSION)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_ops.platform, "machine", lambda: "aarch64")
        with pytest.raises(Unavailable, match="aarch64"):
            cpu_ops.load.__wrapped__()
    monkeypatch.setattr(cpu_ops.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"has no _C.*\.so here"):
        cpu_ops.load.__wrapped__()


@pytest.mark.parametrize(
    ("avx512", "bf16", "name"),
    [
        (False, False, "_C_AVX2.abi3.so"),
        (True, False, "_C_AVX512.abi3.so"),
        (True, True, "_C.abi3.so"),
    ],
)
def test_the_library_is_the_one_that_vllm_takes(monkeypatch, avx512, bf16, name) -> None:
    """It depends on the processor's vector instructions."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    assert cpu_ops.library_name() == name


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backend": "model"}, "backend must be vllm-cpu with op cpu_attention_with_kv_cache"),
        ({"platform": "gfx942"}, "platform must be cpu with op cpu_attention_with_kv_cache"),
        ({"release": "0.11.2"}, "release must be 0.33.0 with op cpu_attention_with_kv_cache"),
        ({"kv_head_range": (0, 1)}, "kv_head_range must be none with backend vllm-cpu"),
        ({"op": "context_attention_fwd"}, "op must be cpu_attention_with_kv_cache with backend"),
    ],
)
def test_op_and_backend_belong_together(changes, text) -> None:
    """The error names the field."""
    with pytest.raises(InvalidCase, match=f"^{text}"):
        on_cpu(**changes)
