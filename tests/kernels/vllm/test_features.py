"""Which features an op has, read from its source: made-up signatures, and releases."""

from pathlib import Path

import pytest
from helpers.cases import refused
from helpers.fake_ops import made
from helpers.sources import needs_triton, of_release

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.masks import MASKS
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.ops import OPS, PREFILL, TRITON_OPS, UNIFIED, WRAPPER, WRITE
from attnlab.kernels import find_backend
from attnlab.kernels.vllm.features import (
    Function,
    check_call,
    check_case,
    has_op,
    lacks,
    missing_scales,
    not_applicable,
    op_functions,
)
from attnlab.kernels.vllm.source import Source, fetch_ops, find_source
from attnlab.lab.lab import Lab

LENS = {"query_lens": (3, 1), "ctx_lens": (5, 20), "block_size": 16}
PREFILL_OP = """
@triton.jit
def kernel(x, KV_FROM_CACHE):
    return x

def context_attention_fwd(q, k, v, o, alibi_slopes=None, sm_scale=None{more}):
    kernel[(1,)](q)
"""
UNIFIED_OP = """
def helper(mode):
    return KVQuantMode.{mode}

def unified_attention(q, k, v, out, causal, window_size, kv_quant_mode, k_scale_cache, v_scale_cache):
    return helper(kv_quant_mode)
"""


def prefill(folder: Path, more: str = ""):
    return made(folder, prefix_prefill=PREFILL_OP.format(more=more))


def case_of(op: str, **fields) -> Case:
    return Case(op=op, backend="vllm", **LENS, **fields)


@pytest.mark.parametrize(
    ("fields", "field", "name"),
    [
        ({"sinks": True}, "sinks", "sinks"),
        ({"sliding_window": 4}, "sliding_window", "sliding_window"),
        ({"interleave_v": True}, "interleave_v", "interleaved_v_pack_factor"),
        ({"mask": "bidirectional"}, "mask", "causal"),
        ({"op_argument": "fp8_output"}, "op_argument", "fp8_out_scale"),
        ({"op_argument": "block_pointers"}, "op_argument", "is_block_table_ptr"),
        (
            {"op_argument": "skip_decode", "output_init": "zeros"},
            "op_argument",
            "skip_decode",
        ),
    ],
)
def test_a_feature_needs_an_argument_of_the_op_at_hand(tmp_path, fields, field, name):
    """The error names the field and the argument; with the argument, there is none."""
    case = case_of(PREFILL, **fields)
    with refused(field, match=rf"^{field} must be .*no argument {name}, got"):
        check_case(prefill(tmp_path / "without"), case)
    check_case(prefill(tmp_path / "with", f", {name}=None"), case)


def test_what_the_op_has_is_applicable(tmp_path):
    source = prefill(tmp_path)
    check_case(source, case_of(PREFILL, alibi=True))
    check_case(source, case_of(PREFILL, op_argument="cached_new_tokens"))
    assert has_op(source, PREFILL)
    assert not has_op(source, UNIFIED)


def test_a_name_inside_the_op_decides(tmp_path):
    """A mode of quantisation is a name in the op's code; a mask by sequence, a parameter of its kernel."""
    case = case_of(UNIFIED, op_argument="int4_per_token_head")
    check_case(
        made(
            tmp_path / "a", triton_unified_attention=UNIFIED_OP.format(mode="INT4_PER_TOKEN_HEAD")
        ),
        case,
    )
    other = made(tmp_path / "b", triton_unified_attention=UNIFIED_OP.format(mode="NONE"))
    with pytest.raises(InvalidCase, match="no INT4_PER_TOKEN_HEAD inside"):
        check_case(other, case)
    with pytest.raises(InvalidCase, match="no USE_PER_SEQ_CAUSAL inside"):
        check_case(other, case_of(UNIFIED, mask="causal_by_sequence"))
    check_case(other, case_of(UNIFIED, mask="bidirectional"))


def test_a_changed_source_is_read_again(tmp_path):
    source = prefill(tmp_path)
    assert lacks(source, PREFILL, "sinks", True) == "no argument sinks"
    prefill(tmp_path, ", sinks=None, more=None")
    assert lacks(source, PREFILL, "sinks", True) == ""


def test_a_call_is_refused_like_its_case():
    call = Lab().call(Case(op=UNIFIED, sinks=True, **LENS))
    with pytest.raises(Unsupported, match=r"^sinks must be false: unified_attention of this vLLM"):
        check_call(call, {"q", "k"})
    check_call(call, {"q", "sinks"})


def test_not_applicable_is_listed(tmp_path):
    (line,) = not_applicable(prefill(tmp_path), PREFILL)
    assert line.startswith("context_attention_fwd: not applicable: sliding_window (no argument")
    assert "bidirectional (no argument causal)" in line
    assert "alibi" not in line
    assert not_applicable(prefill(tmp_path), UNIFIED) == [
        "unified_attention: not applicable: vllm 0.33.0 has no function unified_attention"
    ]


def test_scales_without_an_argument(tmp_path):
    op = "def unified_attention(q, k, v, out{more}):\n    pass\n"
    source = made(tmp_path / "a", triton_unified_attention=op.format(more=""))
    case = case_of(UNIFIED, kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0)
    assert missing_scales(source, case) == {"FP8 cache": ("k_descale", "v_descale")}
    plain = case.replace(kv_cache_dtype="auto", k_scale=1, v_scale=1)
    assert missing_scales(source, plain) == {}
    more = ", k_descale, v_descale"
    whole = made(tmp_path / "b", triton_unified_attention=op.format(more=more))
    assert missing_scales(whole, case) == {}
    query = case.replace(op_argument="fp8_query")
    assert missing_scales(whole, query) == {"FP8 query": ("q_descale",)}
    scales = {"int8 cache": ("k_scale_cache", "v_scale_cache")}
    assert missing_scales(whole, plain.replace(op_argument="int8_per_token_head")) == scales
    more = ", k_descale, v_descale, q_descale, k_scale_cache, v_scale_cache"
    every = made(tmp_path / "c", triton_unified_attention=op.format(more=more))
    assert missing_scales(every, query) == {}
    assert missing_scales(every, plain.replace(op_argument="int8_per_token_head")) == {}


def test_every_mask_and_argument_states_what_it_needs():
    """Those that an op takes without an argument of their own are named here."""
    for mask in MASKS.values():
        assert all(OPS[op].parameters(*mask.states) for op in mask.ops)
    layouts = {
        "gaps",
        "padded_heads",
        "flat_buffers",
        "latent_cache",
        "padded_tokens",
        "spaced_values",
    }
    formats = {"fp8_tokens", "byte_cache", "named_cache_dtype"}
    stated = {name for name, one in OP_ARGUMENTS.items() if one.requires}
    assert OP_ARGUMENTS.keys() - stated == layouts | formats
    assert NONE not in stated
    for one in OP_ARGUMENTS.values():
        assert set(one.requires) <= set(one.ops)


@needs_triton
@pytest.mark.releases
@pytest.mark.parametrize("version", ["0.9.0", "0.13.0", "0.20.2", "0.26.0"])
def test_no_release_before_0_33_0_reads_values_in_packs(version):
    """Their Cases are refused by name, so that a check has none of them."""
    backend = find_backend("vllm", fetch_ops(version), "cpu")
    for op in (WRAPPER, PREFILL):
        case = case_of(op, release="0.33.0", interleave_v=True)
        with refused("interleave_v"):
            check_case(backend.source, case)


@pytest.mark.releases
def test_the_features_of_releases():
    """From the signatures of the releases: when an argument came."""
    has = {
        version: {
            name
            for name, (op, field, value) in {
                "tree": (UNIFIED, "mask", "tree"),
                "clamp": (UNIFIED, "mask", "ranges_in_window"),
                "by_sequence": (UNIFIED, "mask", "causal_by_sequence"),
                "int4": (UNIFIED, "op_argument", "int4_per_token_head"),
                "write": (WRITE, "op_argument", "int8_per_token_head"),
                "cached": (PREFILL, "op_argument", "cached_new_tokens"),
                "splits": (UNIFIED, "num_splits", 4),
            }.items()
            if not lacks(find_source(fetch_ops(version)), op, field, value)
        }
        for version in ("0.9.0", "0.10.2", "0.13.0", "0.20.2", "0.26.0", "0.33.0")
    }
    every = {"tree", "clamp", "by_sequence", "int4", "write", "cached", "splits"}
    assert has == {
        "0.9.0": set(),
        "0.10.2": {"tree"},
        "0.13.0": {"tree", "splits"},
        "0.20.2": {"tree", "splits", "write"},
        "0.26.0": every - {"cached"},
        "0.33.0": every,
    }


# The functions of an op: those that it can reach, in its module and in others of the folder.


OP = """
import torch
from vllm.v1.attention.ops.helpers import scale as scaled
from .more import other
from vllm.logger import init_logger

@triton.jit
def kernel(x, FLAG: tl.constexpr):
    if FLAG:
        x = scaled(x)
    return x

def unused():
    return 1

def unified_attention(q, k, *, out=None):
    from vllm.v1.attention.ops.later import far
    kernel[(1,)](q)
    other(q)
"""


def made_source(folder: Path) -> Source:
    """Return a vLLM with one op."""
    ops = folder / "vllm/v1/attention/ops"
    ops.mkdir(parents=True)
    (ops / "triton_unified_attention.py").write_text(OP)
    (ops / "helpers.py").write_text("def scale(x):\n    return x\n\ndef rest(x):\n    return 0\n")
    (ops / "more.py").write_text("def other(x):\n    return scale(x)\n")
    (ops / "later.py").write_text("def far(x):\n    return x\n")
    return Source(kind="checkout", path=folder, root=folder, version="0.33.0")


def test_reached_functions_are_found(tmp_path):
    found = op_functions(made_source(tmp_path), "unified_attention")
    names = [(one.file.name, one.name, one.is_kernel) for one in found]
    assert names == [
        ("helpers.py", "scale", False),
        ("more.py", "other", False),
        ("triton_unified_attention.py", "kernel", True),
        ("triton_unified_attention.py", "unified_attention", False),
    ]
    kernel, op = found[2:]
    assert kernel.statements == {9, 10, 11}
    assert kernel.branches["9.0"].text == "FLAG"
    assert op.parameters == ("q", "k", "out")
    assert op_functions(made_source(tmp_path / "b"), "merge_attn_states") == []


def test_functions_as_json(tmp_path):
    source = made_source(tmp_path)
    for one in op_functions(source, "unified_attention"):
        fields = one.to_dict(source.root)
        assert not Path(fields["file"]).is_absolute()
        again = Function.of_dict(fields)
        assert (again.statements, again.branches) == (one.statements, one.branches)
        assert (again.name, again.text) == (one.name, one.text)


@pytest.mark.releases
def test_the_functions_of_a_release():
    source = of_release("0.33.0")
    found = {op: {one.name for one in op_functions(source, op)} for op in TRITON_OPS}
    assert {"unified_attention", "kernel_unified_attention", "reduce_segments"} <= found[
        "unified_attention"
    ]
    assert "apply_softcap" in found["unified_attention"]
    assert {"_fwd_kernel", "_fwd_kernel_alibi"} <= found["chunked_prefill_paged_decode"]
    assert "unified_attention_int4" not in found["unified_attention"]
