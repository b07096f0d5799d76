"""The records of ops: names, expressions, and ops of a library that is read from a source."""

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers.cases import refused
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unavailable, Unsupported
from attnlab.case.op_arguments import OP_ARGUMENTS
from attnlab.case.ops import OPS, WRITE
from attnlab.checker.check import check
from attnlab.contracts.contract import Target
from attnlab.kernels import find_backend
from attnlab.kernels.binding import Values, arguments_of, bind, evaluate
from attnlab.kernels.vllm.op_arguments import _other_strides
from attnlab.lab.lab import Lab
from attnlab.lab.reference import Rounding
from attnlab.library.op import Op, libraries, ops_of, package_of

DECODE = """
from sglang.srt.utils import is_cuda, never_used

assert is_cuda()

def decode_attention_fwd(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse,
                         num_kv_splits, max_kv_splits, sm_scale, k_scale, v_scale, logit_cap=0.0,
                         page_size=1):
    import torch
    for i in range(len(q)):
        slots = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].long()
        group = q.shape[1] // k_buffer.shape[1]
        key, value = (one[slots].float().repeat_interleave(group, 1) for one in (k_buffer, v_buffer))
        rounded = lambda one: one.to(k_buffer.dtype).float()
        scores = torch.einsum("hd,khd->hk", rounded(q[i]), key) * sm_scale * k_scale{fault}
        scores = logit_cap * torch.tanh(scores / logit_cap) if logit_cap else scores
        o[i] = torch.einsum("hk,khd->hd", rounded(scores.softmax(-1)), value) * v_scale
"""


def sglang(folder: Path, fault: str = "") -> Path:
    """Return a made-up SGLang with one op, whose text is ours."""
    ops = folder / "sglang/kernels/ops/attention"
    ops.mkdir(parents=True)
    (ops / "decode_attention.py").write_text(DECODE.replace("{fault}", fault))
    return folder


def call_of(op: Op, **fields):
    context = {} if op.context else {"ctx_lens": (0, 0)}
    lens = {"query_lens": (1, 1), "ctx_lens": (5, 20), "block_size": 16, **context}
    backend = {} if op.library == "vllm" else {"backend": op.backends[0]}
    case = Case(op=op.name, num_heads=4, **lens, **backend, **fields)
    return Lab().call(case), Target.of(case)


@pytest.mark.parametrize("library", libraries())
def test_a_library_has_a_package_and_records(library):
    assert package_of(library).library == library
    for op in ops_of(library):
        assert (op.library, OPS[op.name]) == (library, op)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.is_triton])
def test_each_argument_of_a_record_has_a_value(name):
    op = OPS[name]
    call, target = call_of(op)
    names = arguments_of(call, target).keys()
    assert names <= op.arguments.keys()
    assert {*op.strides} - names <= {"k_scale_cache", "v_scale_cache"}


STRIDED = [name for name in OP_ARGUMENTS["gaps"].ops if not OPS[name].merges]


@pytest.mark.parametrize("name", STRIDED)
def test_values_have_other_strides_than_keys(name):
    """With equal ones, a kernel that takes the stride of the other would be right."""
    op = OPS[name]
    call, target = call_of(op)
    case = Case(op=name, backend=op.backends[0], query_lens=(1,), ctx_lens=(0,))
    given = _other_strides(case, arguments_of(call, target))
    keys = [one for one in given if one.split("_")[0] in ("k", "key") and "scale" not in one]
    assert keys
    for one in keys:
        if one == "key_cache" and name == WRITE:  # the argument spaced_values has those
            continue
        other = one.replace("key", "value", 1) if "key" in one else one.replace("k", "v", 1)
        used = max(op.strides[one] - 1, 1)
        pairs = [*zip(given[one].stride(), given[other].stride(), strict=False)]
        assert all(a != b for a, b in pairs[:used]), one


def test_a_window_of_a_decode_that_is_not_causal_has_two_sides():
    fields = {"mask": "bidirectional", "sliding_window": 4, "platform": "gfx942"}
    call, target = call_of(OPS["aiter_fwd_decode"], **fields)
    given = arguments_of(call, target)
    names = ("causal", "window_size_left", "window_size_right")
    assert [given[name] for name in names] == [False, 3, 3]


def test_a_block_table_has_columns_with_gaps():
    call, target = call_of(OPS["lmdeploy_fill_kv_cache"])
    case = Case(op=call.op, backend="library:lmdeploy", query_lens=(1,), ctx_lens=(0,))
    table = _other_strides(case, arguments_of(call, target))["block_offsets"]
    assert table.stride(1) == 2
    assert torch.equal(table, call.block_table)


def test_a_planted_name_is_not_known():
    call, target = call_of(OPS["unified_attention"])
    with pytest.raises(
        Unavailable, match=r"^the record of unified_attention must use .*, got windw"
    ):
        evaluate("windw + 1", Values(call, target))


def test_lists_of_slots():
    call, target = call_of(OPS["sglang_decode_attention"])
    given = arguments_of(call, target)
    starts, slots = given["kv_indptr"].tolist(), given["kv_indices"]
    assert starts == [0, 6, 27]
    first, second = call.block_table.long()
    assert slots[:6].tolist() == (first[0] * 16 + slots.new_tensor(range(6))).tolist()
    assert int(slots[-1]) == int(second[1]) * 16 + 4


def test_a_required_argument_that_the_record_lacks_is_named():
    call, target = call_of(OPS["unified_attention"])
    with pytest.raises(Unavailable, match="requires the argument tau, which the lab does not know"):
        bind(lambda q, tau: None, call, target)


@needs_triton
def test_a_library_is_checked_from_its_source(tmp_path):
    """It is not imported: its other modules are stubs. A planted fault is found and named."""
    right = check(library="sglang", source=sglang(tmp_path / "a"), cases=4, engine="local:1")
    assert (right.cases_run, right.findings) == (4, [])
    wrong = sglang(tmp_path / "b", fault=" * 2")
    (found,) = check(library="sglang", source=wrong, cases=2, engine="local:1").findings
    assert (found.kind, found.op) == ("wrong_output", "sglang_decode_attention")
    assert found.diagnosis == "the scores of keys are multiplied by a further 2"


@needs_triton
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_query_and_weights_in_the_format_of_a_cache(tmp_path, kv_cache_dtype):
    """Rounding alone is right; a query that FP8 does not hold has a larger bound, and wrong scales show."""
    lab = Lab(source=sglang(tmp_path))
    one = Case(
        op="sglang_decode_attention",
        backend="library:sglang",
        **{"query_lens": (1, 1), "ctx_lens": (5, 20), "block_size": 16, "num_heads": 4},
        **{"num_queries_per_kv": 2, "head_size": 32, "k_scale": 0.5, "v_scale": 0.25},
        **{"kv_cache_dtype": kv_cache_dtype, "distribution": "normal", "platform": "sm_90"},
    )
    assert lab.run(one).status == "match"
    file = next(tmp_path.rglob("decode_attention.py"))
    for i, (right, wrong) in enumerate((("* v_scale", "* k_scale"), ("* k_scale", "* 1.0"))):
        root = sglang(tmp_path / str(i))
        (root / file.relative_to(tmp_path)).write_text(file.read_text().replace(right, wrong))
        assert Lab(source=root).run(one).status == "mismatch"
    call, kernels = lab.call(one), (one.op,)
    odd = dataclasses.replace(call, query=call.query * 1.01)
    even, rounded = (Rounding.of(each, Target.of(one), kernels) for each in (call, odd))
    assert rounded.products > even.products == 0


@needs_triton
def test_what_the_function_at_hand_lacks_is_not_applicable(tmp_path):
    backend = find_backend("library:sglang", sglang(tmp_path))
    lines = backend.not_applicable("sglang_decode_attention")
    assert "sglang_decode_attention: not applicable: sinks (no argument sinks)" in lines
    lens = {"query_lens": (1,), "ctx_lens": (5,), "platform": "sm_90"}
    case = Case(op="sglang_decode_attention", backend="library:sglang", sinks=True, **lens)
    with pytest.raises(
        InvalidCase, match=r"^sinks must be false with sglang_decode_attention of sglang"
    ):
        backend.check_features(case)
    with pytest.raises(
        Unsupported, match=r"^sinks must be false: sglang_decode_attention of this sglang"
    ):
        Lab(source=backend.path).run(case)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"library": "sglng"}, "library"),
        ({"library": "sglang", "kernel": "mine.py:f"}, "library"),
        ({"library": "sglang", "source": "/nowhere"}, "source"),
    ],
)
def test_a_wrong_library_is_refused(given, field):
    with refused(field):
        check(**given)


def test_a_record_cannot_take_the_name_of_another_op(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from attnlab.library.op import Op\n"
        "ONE = Op(name='unified_attention', summary='', library='mine', module='mine', "
        "new_tokens_from='cache', cache_layout='flash', result='returned')\n"
    )
    with pytest.raises(InvalidCase, match="name must be new, got unified_attention"):
        find_backend(f"{file}:ONE")
