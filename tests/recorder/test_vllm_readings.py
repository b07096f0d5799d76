"""Calls of vLLM's ops whose meaning is not in the names of their arguments alone."""

import dataclasses
import sys

import pytest
import torch
from helpers.cases import hostile, same_bits
from helpers.masked_cases import random_case
from helpers.sources import RELEASES, needs_triton, of_release, release

import attnlab
from attnlab.case.case import Case
from attnlab.case.ops import DECODE_FWD, OPS, PREFILL, UNIFIED, WRAPPER
from attnlab.contracts.contract import Target
from attnlab.diagnosis.candidates import locate
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.diagnosis.decision import collect_evidence
from attnlab.kernels.binding import bind
from attnlab.kernels.vllm.backend import load
from attnlab.lab.lab import Lab
from attnlab.lab.problem import make_problem
from attnlab.recorder.arguments import BoundArguments, call_of_reading, read_arguments
from attnlab.recorder.ops import FOLDERS, vllm_ops
from attnlab.show.sheets.results import contents
from attnlab.tensors.call import Origin
from attnlab.tensors.visibility import Visibility

OPS_OF = {one.op: one for one in vllm_ops() if one.module.startswith(FOLDERS[1])}
PREFILL_OP = OPS_OF[PREFILL]


def test_a_prefill_without_new_tokens_reads_them_from_the_cache():
    """vLLM 0.33.0 passes no keys and values if all of them are in the cache."""
    case = hostile(op=UNIFIED, query_lens=(5, 1), ctx_lens=(20, 33))
    problem = make_problem(case)
    given = problem.call
    exact = problem.correct_rows(torch.arange(6), torch.arange(problem.num_heads)).output
    arguments = {
        "q": given.query,
        "k": None,
        "v": None,
        "o": exact.to(given.query.dtype),
        "k_cache": given.key_cache,
        "v_cache": given.value_cache,
        "b_loc": given.block_table,
        "b_start_loc": given.query_start_loc,
        "b_seq_len": given.seq_lens,
        "sm_scale": given.sm_scale,
    }
    reading = PREFILL_OP.read(arguments)
    origin = Origin(op=PREFILL_OP.name, program="vllm", release="0.33.0", platform="sm_90")
    call = call_of_reading(reading, origin, op=PREFILL_OP.op, layout=PREFILL_OP.layout)
    assert (call.op, call.new_tokens) == (UNIFIED, "in the cache")
    assert not diagnose_captured(call, case).is_wrong
    call.output[0, 0] += 1
    assert diagnose_captured(call, case).wrong_rows == 1


def test_a_buffer_that_held_the_output_before_shows_no_unwritten_rows():
    """A test that calls an op twice records a second buffer that the first call has filled; NaN that a
    kernel computes looks like NaN that a test put there."""
    case = hostile(op=UNIFIED, query_lens=(5, 1), ctx_lens=(20, 33))
    for number in (7.0, float("nan")):
        given = make_problem(case).call
        given.output.fill_(number)
        call = dataclasses.replace(given, before=given.output.clone())
        names = [one.name for one in diagnose_captured(call, case).explanations]
        assert "rows_never_written" not in names


def test_a_buffer_with_right_rows_shows_no_unwritten_rows():
    """Recycled memory holds results of an earlier call: a right row, and a wrong one that recurs."""
    given = make_problem(hostile(op=UNIFIED, query_lens=(5, 1), ctx_lens=(20, 33))).call
    output = Lab(device="cpu").output(hostile(op=UNIFIED, query_lens=(5, 1), ctx_lens=(20, 33)))
    given.output.copy_(output)
    before = torch.full_like(output, 7.0)
    given.output[4] *= 2
    for rows, unwritten in ([4], [4]), ([0, 4], []):
        held = before.clone()
        held[rows] = given.output[rows]
        found = diagnose_captured(dataclasses.replace(given, before=held), Case())
        assert found.wrong_rows == 1
        assert found.unwritten == unwritten
    assert not any("kernel wrote" in one for one in found.sentences())


def test_a_right_row_is_not_unwritten():
    """Its buffer held the result already."""
    case = hostile(op=UNIFIED, query_lens=(5, 1), ctx_lens=(20, 33))
    call, lab = make_problem(case).call, Lab(device="cpu")
    call.output.copy_(lab.output(case))
    evidence = collect_evidence(
        dataclasses.replace(make_problem(case), before=call.output.clone()),
        call.output,
        locate(make_problem(case), call.output),
        (),
    )
    assert evidence.unwritten.tolist() == []


def test_the_page_of_an_fp8_call():
    """Its tensors have a range, although torch has no minimum of FP8 numbers."""
    assert contents(torch.tensor([[1.0, -2.0]]).to(torch.float8_e4m3fn)) == "-2 to 1"


# The parameters of the ops in the releases 0.9.0 to 0.33.0.
PARAMETERS = {
    WRAPPER: """query key value output kv_cache_dtype key_cache value_cache block_table query_start_loc
        seq_lens max_seq_len max_query_len k_scale v_scale alibi_slopes sliding_window sm_scale sinks
        output_scale is_block_table_ptr causal use_interleaved_v_cache""",
    PREFILL: """q k v o kv_cache_dtype k_cache v_cache b_loc b_start_loc b_seq_len max_seq_len max_input_len
        k_scale v_scale alibi_slopes sliding_window sm_scale skip_decode sinks fp8_out_scale
        is_block_table_ptr causal interleaved_v_pack_factor""",
    UNIFIED: """q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal block_table
        softcap q_descale k_descale v_descale alibi_slopes qq_bias sinks output_scale seq_threshold_3D
        num_par_softmax_segments softmax_segm_output softmax_segm_max softmax_segm_expsum mm_prefix_range
        use_alibi_sqrt kv_quant_mode k_scale_cache v_scale_cache chunk_lookback use_td rswa_prefix_lens
        rswa_window mm_prefix_clamp_sliding_window""",
    DECODE_FWD: """q k_buffer v_buffer o req_to_token b_seq_len attn_logits num_kv_splits sm_scale page_size
        logit_cap lse k_scale v_scale is_mla""",
}


@pytest.mark.parametrize("op", PARAMETERS)
def test_every_argument_of_a_vllm_op_is_known(op):
    """Another one is kept with its value."""
    given = dict.fromkeys(PARAMETERS[op].split(), 3) | {"window_size": (7, 0)}
    del given["window_size" if op != UNIFIED else "rswa_window"]
    known = OPS_OF[op].reads
    assert read_arguments(BoundArguments(given, {}), known).unknown == {}
    more = {**given, "temperature": 0.5, "bias": None}
    assert read_arguments(BoundArguments(more, {}), known).unknown == {"temperature": 0.5}
    assert read_arguments(BoundArguments(more, {"temperature": 0.5}), known).unknown == {}


@pytest.mark.parametrize(
    ("name", "is_foreign"),
    [
        (None, False),
        ("vllm.v1.attention.ops.triton_decode_attention.decode_attention_fwd", False),
        ("vllm.attention.ops.prefix_prefill.context_attention_fwd", False),
        ("vllm._custom_ops.reshape_and_cache_flash", False),
        ("sglang.srt.layers.attention.triton_ops.decode_attention.decode_attention_fwd", True),
        ("vllm.lora.ops.decode_attention.decode_attention_fwd", True),
        ("vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func", True),
        ("mine.unified_attention", True),
    ],
)
def test_an_op_is_known_by_its_module(name, is_foreign):
    """Other libraries have functions of the same name; vLLM's contracts are not theirs."""
    call = make_problem(hostile(op=UNIFIED, query_lens=(1, 1), ctx_lens=(20, 33))).call
    assert dataclasses.replace(call, origin=Origin(op=name)).is_foreign == is_foreign


def test_a_decode_may_have_a_table_with_a_third_dimension():
    """vLLM's own test passes one of size 1."""
    call = make_problem(hostile(op=DECODE_FWD, query_lens=(1, 1), ctx_lens=(20, 33))).call
    arguments = {
        "q": call.query,
        "k_buffer": torch.zeros(8, 16, 3, 64),
        "v_buffer": torch.zeros(8, 16, 3, 64),
        "o": call.output,
        "req_to_token": call.block_table[:, :, None],
        "b_seq_len": call.seq_lens,
        "page_size": 16,
    }
    found = OPS_OF[DECODE_FWD].read(arguments).fields["block_table"]
    assert torch.equal(found, call.block_table)


# vLLM's own Triton ops, of two releases and under the interpreter, are recorded and found correct.


FOLDER_OF = {"0.11.2": "vllm.attention.ops"}
LENS = {
    WRAPPER: {"query_lens": (5, 1), "ctx_lens": (20, 33)},
    PREFILL: {"query_lens": (5, 3), "ctx_lens": (20, 33)},
    UNIFIED: {"query_lens": (5, 1), "ctx_lens": (20, 33)},
    DECODE_FWD: {"query_lens": (1, 1), "ctx_lens": (20, 33)},
}
SAME = ("query", "key_cache", "value_cache", "block_table", "seq_lens", "query_start_loc")


@needs_triton
@pytest.mark.releases
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("op", LENS)
def test_a_recorded_call_is_the_call(monkeypatch, op, version):
    """Its tensors are those that the lab passed, and its output has nothing wrong; a changed one has."""
    source = release(version)
    if isinstance(source, str):
        pytest.skip(source)
    case = hostile(
        op=op,
        backend="vllm",
        release=version,
        platform="sm_90",
        output_init="recycled",
        empty_slots="zeros",  # 0.11.2 multiplies NaN in the tail of a block by 0
        sm_scale=0.2,
        **LENS[op],
    )
    module = load(source, case.machine, "cpu").loader.load(OPS[op].module)
    folder = FOLDER_OF.get(version, "vllm.v1.attention.ops")
    monkeypatch.setitem(sys.modules, f"{folder}.{OPS[op].module}", module)
    lab = Lab(source=source.path, device="cpu")
    with attnlab.capture() as calls:
        result = lab.run(case)
    (call,) = calls
    assert (call.op, call.origin.program, call.sm_scale) == (op, "vllm", 0.2)
    assert (call.unknown_arguments, call.read_as, call.is_foreign) == ((), (), False)
    for name in SAME:
        assert same_bits(getattr(call, name), getattr(result.call, name)), name
    assert same_bits(call.output, result.call.output)
    assert not torch.equal(call.before, call.output)
    assert attnlab.diagnose(call, platform="sm_90", release=version).status == "nothing wrong"
    wrong = call.output.clone()
    wrong[-1] *= 2
    assert attnlab.diagnose(call, wrong, platform="sm_90", release=version).wrong_rows == 1


# Captured calls with a mask have a reference: they are found correct, and wrong without their mask.


FIELDS = [field.name for field in dataclasses.fields(Visibility)]


@needs_triton
@pytest.mark.releases
@pytest.mark.parametrize(
    ("mask", "data"),
    [
        ("bidirectional", {"causal": True}),
        ("causal_by_sequence", {"causal": True}),
        ("ranges", {"mm_prefix_range": None}),
        ("ranges_in_window", {"mm_prefix_clamp_sliding_window": False}),
        ("prefix_and_window", {"rswa_prefix_lens": None}),
        ("chunks", {"chunk_lookback": -1}),
        ("tree", {"qq_bias": None}),
    ],
)
def test_arguments_become_the_same_mask(mask, data):
    """The arguments that the op of 0.33.0 gets are read back, and the call is diagnosed."""
    changes = {"query_lens": (19, 3, 2), "ctx_lens": (20, 0, 37), "mm_prefix_range": None}
    changes |= dict.fromkeys(("causal_seqs", "rswa_prefix_lens", "tree_parents", "chunk_lookback"))
    changes |= {"sliding_window": 6, "dtype": "float32", "block_size": 16}
    case = random_case(mask, 2, **changes)
    lab = Lab()
    call = lab.call(case)
    call.output.copy_(lab.reference(case).to(call.output.dtype))
    source, target = of_release("0.33.0"), Target.of(case)
    function = load(source, target.platform, "cpu").function(case.op)
    reading = read_arguments(bind(function, call, target))
    next(op for op in vllm_ops() if op.op == case.op).adjust(bind(function, call, target), reading)
    for name in ("causal", "mm_prefix_range", "rswa_prefix_lens"):
        given = reading.fields.get(name)
        if isinstance(given, torch.Tensor):  # an engine's buffer, with room for more sequences
            reading.fields[name] = torch.cat([given, given])
    again = call_of_reading(reading, Origin(release="0.33.0"), op=case.op, layout="flash")
    assert again.unmodelled == ()
    for name in FIELDS:
        one, other = getattr(call, name), getattr(again, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
    assert attnlab.diagnose(again).status == "nothing wrong"
    assert attnlab.diagnose(dataclasses.replace(again, **data)).status != "nothing wrong"
