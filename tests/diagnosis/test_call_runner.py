"""A saved call with its kernel is diagnosed as its Case is: the same fault gets the same statement."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import faulty_attention
from helpers.plugins import RIGHT
from helpers.saved_calls import WRONG, call_of, kernel_file
from helpers.sources import needs_triton, of_release

import attnlab
from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.cli.main import main
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import find_backend
from attnlab.kernels.run_call import backend_of_origin, run_call
from attnlab.lab.call_lab import call_lab
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall, Origin
from attnlab.tensors.case_call import presented

FAULTY = Path(faulty_attention.__file__)
LENS = {"query_lens": (20, 1, 40), "ctx_lens": (33, 60, 128)}
SIZES = {"num_heads": 4, "num_queries_per_kv": 2, "head_size": 32, "block_size": 16}
DATA = {"distribution": "normal", "empty_slots": "nan", "platform": "sm_90"}
CASE = attnlab.Case(op="context_attention_fwd", **LENS, **SIZES, **DATA)


def saved(case: attnlab.Case, lab: Lab, folder: Path) -> KernelCall:
    """Return a Case's call from the file of --save-call."""
    file = folder / "call.safetensors"
    lab.run(case).recorded_call.save(file)
    return KernelCall.load(file)


@functools.cache
def conclusion_of(case: attnlab.Case) -> str:
    """Return the conclusion of the diagnosis of a Case."""
    return diagnose(case, lab=Lab(), propose=False, limit=None).conclusion


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("values_not_rescaled", {}, "with tiles of 32, the accumulator of earlier tiles is not"),
        (
            "window_too_wide_new",
            {"sliding_window": 16},
            "in the loop over the new tokens, the window",
        ),
        ("full_blocks_only", {}, "no key counts after the last full group of 16"),
    ],
    ids=["tiles", "window", "groups"],
)
@pytest.mark.quick("tiles")
def test_a_saved_call_gets_the_statement_of_its_case(tmp_path, name, changes, words):
    lab, backend = Lab(), f"{FAULTY}:{name}"
    case = CASE.replace(backend=backend, **changes)
    expected = conclusion_of(case)
    call = saved(case, lab, tmp_path)
    found = attnlab.diagnose(call, backend=backend)
    assert found.conclusion == expected
    assert expected.startswith(words)
    assert not any("no kernel is given" in text for text in found.unknown)


def test_a_saved_call_without_its_kernel_gets_no_rule(tmp_path):
    call = saved(CASE.replace(backend=f"{FAULTY}:values_not_rescaled"), Lab(), tmp_path)
    alone = attnlab.diagnose(call)
    assert alone.status == "unexplained"
    assert any("no kernel is given" in text for text in alone.unknown)


@needs_triton
@pytest.mark.releases
def test_an_edit_of_vllm_gets_the_statement_of_its_case(tmp_path, capsys):
    shutil.copytree(of_release("0.33.0").root / "vllm", tmp_path / "wrong" / "vllm")
    file = next((tmp_path / "wrong").rglob("prefix_prefill.py"))
    text = file.read_text()
    file.write_text(text.replace("acc = acc * alpha[:, None]", "pass", 1))
    case = CASE.replace(backend="vllm", empty_slots="zeros")
    call = saved(case, Lab(source=tmp_path / "wrong", device="cpu"), tmp_path)
    words = "in the loop over the context, the accumulator of earlier tiles is not rescaled"
    path = tmp_path / "call.safetensors"
    arguments = ["diagnose", "--call", str(path), "--no-location", "--json"]
    assert main([*arguments, "--source", str(tmp_path / "wrong")]) == 1
    assert words in json.loads(capsys.readouterr().out)["sentences"][0]
    assert words not in attnlab.diagnose(call).conclusion


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8", "k_scale": 0.7, "v_scale": 0.3, "platform": "gfx942"},
        {"sliding_window": 20, "freed": "empty", "empty_slots": "nan"},
        {"sliding_window": 20, "freed": "recycled"},
        {"op": "unified_attention", "kv_layout": "fused", "pad_batch": 3, "alibi": True},
        {"op": "unified_attention", "mask": "ranges", "softcap": 2.0},
        {
            "op": "chunked_prefill_paged_decode",
            "stage": "int32_before_cumsum",
            "interleave_v": True,
        },
        {
            "dtype": "bfloat16",
            "distribution": "large_scores",
            "sinks": True,
            "max_blocks_per_seq": 20,
        },
    ],
)
def test_the_case_of_a_call_has_its_arguments(changes):
    """As saved, and as a program passes it: with its own padding and strides."""
    lab, case = Lab(), CASE.replace(**changes)
    ran = lab.run(case)
    for call in (ran.recorded_call, presented(ran.recorded_call)):
        own = call_lab(call, case, find_backend("model"))
        assert torch.equal(own.output(own.case).nan_to_num(), ran.output.nan_to_num())
        held = own.cache(own.case.replace(empty_slots="garbage")).provenance.seq >= 0
        assert torch.equal(held, ran.cache.provenance.seq >= 0)
        kept = {name: getattr(own.case, name) for name in ("mask", "freed", "fill", "distribution")}
        fill = case.staging.fill
        assert kept == {name: getattr(case, name) for name in kept} | {"fill": own.case.fill}
        assert own.case.staging.fill == fill


def test_blocks_that_sequences_share_get_copies():
    call = call_of(query_lens=(5, 1), ctx_lens=(40, 40))
    table = call.block_table.clone()
    table[1, :2] = table[0, :2]  # a common prefix
    shared = dataclasses.replace(call, block_table=table)
    case = attnlab.Case(platform="sm_90")
    kernel = find_backend("model")
    own = call_lab(shared, case, kernel)
    assert torch.equal(own.output(own.case), run_call(shared, kernel, case))
    assert len(own.given.block_table.unique()) > len(table.unique())


@pytest.mark.slow
def test_a_wrong_kernel_is_explained_if_the_recorded_output_is_right(tmp_path):
    lab, backend = Lab(), f"{FAULTY}:values_not_rescaled"
    call = saved(CASE, lab, tmp_path)
    expected = conclusion_of(CASE.replace(backend=backend))
    found = attnlab.diagnose(call, backend=backend, locate=False)
    assert found.sentences()[0] == expected
    assert found.sentences()[1].startswith("the recorded output is right: what is explained is")
    assert not attnlab.diagnose(call, backend="model").is_wrong


def test_a_kernel_that_is_right_explains_no_recorded_output(tmp_path):
    wrong, right = (
        kernel_file(tmp_path, text, (text is RIGHT and "r") or "w") for text in (WRONG, RIGHT)
    )
    case = attnlab.Case(**{**CASE.changes(), "op": "unified_attention", "backend": wrong})
    call = saved(case, Lab(), tmp_path)
    found = attnlab.diagnose(call, backend=right)
    assert found.conclusion == attnlab.diagnose(call).conclusion
    assert "gives the right output" in found.unknown[-1]


SCALED = """
import dataclasses

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.lab.problem import Problem, all_rows


def kernel(call):
    problem = Problem.of_call(call, Target.of(Case(platform="sm_90")), ("unified_attention",))
    for rows in all_rows(problem.with_kernel_rounding()):
        inputs = problem.attention_inputs(rows)
        wrong = dataclasses.replace(inputs, sm_scale=inputs.sm_scale * FACTOR)
        call.output[problem.rows(rows)] = problem.predict(wrong).output.to(call.output.dtype)


kernel.op = "unified_attention"
"""


@pytest.mark.parametrize(("factor", "status"), [(2.0, "explained"), (1.0, "nothing wrong")])
def test_a_call_that_no_case_has_is_confirmed_on_varied_calls(tmp_path, factor, status):
    """The keys of its FP8 cache have a scale per token, which the report names."""
    call = call_of(kv_cache_dtype="fp8", k_scale=0.7, v_scale=0.3)
    scale = 0.5 + torch.rand(len(call.key_cache), call.block_size, call.key.shape[1])
    odd = dataclasses.replace(call, k_scale=scale, before=torch.full_like(call.buffer, 7.0))
    file = tmp_path / "scaled.py"
    file.write_text(SCALED.replace("FACTOR", str(factor)))
    kernel = find_backend(f"{file}:kernel")
    with pytest.raises(InvalidCall) as error:
        call_lab(odd, attnlab.Case(platform="sm_90"), kernel)
    assert error.value.field == "k_scale"
    output = run_call(odd, kernel, attnlab.Case(platform="sm_90"))
    found = attnlab.diagnose(dataclasses.replace(odd, output=output), backend=kernel.name)
    assert found.status == status
    assert any("no Case has this call: k_scale must be" in text for text in found.unknown)
    assert found.conclusion.startswith("scale_doubled") == (factor == 2.0)


@pytest.mark.slow
def test_a_rule_is_searched_for_without_a_case(tmp_path, monkeypatch):
    def refused(*given, **options):
        raise InvalidCall("mask must be one, got two", field="mask")

    monkeypatch.setattr("attnlab.diagnosis.captured.call_lab", refused)
    case = CASE.replace(backend=f"{FAULTY}:nothing_rescaled", empty_slots="garbage")
    call = saved(case, Lab(), tmp_path)
    found = attnlab.diagnose(call, backend=case.backend)
    words = "with tiles of 32, earlier tiles are not rescaled (confirmed on 2 further cases)"
    assert found.conclusion == words
    assert attnlab.diagnose(call).status == "unexplained"
    assert any("mask must be one" in text for text in found.unknown)


BY_NAME = '''

def attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, scale=None, *, extra=EXTRA):
    """Call the kernel of the file with arguments by name."""
    import dataclasses

    import torch

    from attnlab.tensors.call import KernelCall

    call = KernelCall.from_tensors(
        query=q,
        key_cache=k_cache,
        value_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        layout="flash",
    )
    call = dataclasses.replace(call, sm_scale=scale).with_buffer()
    my_attention(call)
    return call.output
'''


@pytest.mark.slow
def test_a_function_that_takes_tensors_is_a_runner(tmp_path, monkeypatch):
    """By its file, by its module, and as the op that the call's origin names."""
    text = WRONG + BY_NAME
    (tmp_path / "taking_tensors.py").write_text(text.replace("=EXTRA", "=None"))
    (tmp_path / "demanding.py").write_text(text.replace("=EXTRA", ""))
    monkeypatch.syspath_prepend(tmp_path)
    spec = "taking_tensors:attention"
    call = saved(CASE.replace(op="unified_attention", backend=spec), Lab(), tmp_path)
    named = dataclasses.replace(call, origin=Origin(op="taking_tensors.attention"))
    file = f"{tmp_path / 'taking_tensors.py'}:attention"
    for given, runner in ((call, find_backend(spec)), (call, find_backend(file)), (named, None)):
        runner = runner or backend_of_origin(given)
        found = diagnose_captured(given, attnlab.Case(), runner=runner, limit=None)
        assert found.conclusion.startswith("causal_plus_one")
        assert not any("would show" in text for text in found.unknown)
    with pytest.raises(InvalidCase, match="extra must be an argument that attnlab knows"):
        attnlab.diagnose(call, backend="demanding:attention")


DECODE = """
import torch

def decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    keys = torch.arange(int(seq_lens.max()))
    pages = block_table[:, keys // k_cache.shape[1]].long()
    k, v = (
        one[pages, keys % one.shape[1]].repeat_interleave(q.shape[1] // one.shape[2], 2).float()
        for one in (k_cache, v_cache)
    )
    scores = torch.einsum("shd,skhd->shk", q.float(), k) * softmax_scale
    scores = scores.masked_fill(keys >= seq_lens[:, None, None] - 1, -torch.inf)
    return torch.einsum("shk,skhd->shd", scores.softmax(-1), v).to(q.dtype)
"""


def test_a_kernel_runs_calls_of_another_op_than_its_arguments_suggest(tmp_path):
    (tmp_path / "mine.py").write_text(DECODE)
    backend = f"{tmp_path / 'mine.py'}:decode"
    call = call_of(query_lens=(1, 1), ctx_lens=(20, 33), op="unified_attention")
    assert call.op not in find_backend(backend).ops
    assert attnlab.diagnose(call, backend=backend, locate=False).is_wrong
    assert attnlab.xray(call, backend=backend).status == "described"
    assert attnlab.shrink_call(call, backend=backend).is_failing
    assert attnlab.replay_call(call, backends=[backend]).replays[0].status == "mismatch"


def test_a_function_may_return_its_output_and_ignore_the_argument_for_it(tmp_path):
    text = DECODE.replace("softmax_scale):", "softmax_scale, out=None):").replace(
        " - 1, -torch", ", -torch"
    )
    (tmp_path / "mine.py").write_text(text)
    call = call_of(query_lens=(1, 1), ctx_lens=(20, 33), op="unified_attention")
    assert not attnlab.diagnose(call, backend=f"{tmp_path / 'mine.py'}:decode").is_wrong


def test_bad_runners(tmp_path, capsys):
    path = tmp_path / "call.safetensors"
    call_of().save(path)
    for flags, words in (
        (["--kernel", "no_such_module:f"], "module no_such_module of backend cannot be imported"),
        (["--kernel", "nofile.py:f"], "backend must be FILE.py:FUNCTION of a file that exists"),
        (["--kernel", "a.py:f", "--backend", "model"], "kernel and backend must not both be given"),
        (["--source", "9.9.9"], "source must be a release that was downloaded, got 9.9.9"),
        (["--backend", "vllm", "--source", str(tmp_path)], "source must be"),
    ):
        assert main(["diagnose", "--call", str(path), *flags]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
