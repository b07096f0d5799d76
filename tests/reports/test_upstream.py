"""Reports for upstream: the script fails if the bug is present, passes otherwise, and does not import
attnlab."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.sources import needs_triton, of_release
from helpers.triton_example import CASE
from helpers.upstream import script_outcome, written

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.masks import MASKS
from attnlab.checker.finding import Finding
from attnlab.cli.main import main
from attnlab.lab.lab import Lab
from attnlab.reports.upstream import has_script, mask_facts, render, tensor_text, write_reports
from attnlab.tensors.case_call import mask_of

pytestmark = needs_triton

DECODE = {
    "op": "chunked_prefill_paged_decode",
    "query_lens": (1,),
    "ctx_lens": (20,),
    "num_blocks": 3,
}
UNIFIED = {"op": "unified_attention"}
SHORT = {**UNIFIED, "query_lens": (2,), "ctx_lens": (0,), "num_blocks": None}
ENCODER = {**SHORT, "op": "triton_prefill_attention", "backend": "vllm"}
FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0}
DESCRIPTORS = {
    **SHORT,
    "backend": "vllm",
    "op_argument": "tensor_descriptors",
    "query_lens": (1,),
    "ctx_lens": (1,),
}
# Formats that an op argument passes: an FP8 query, and an INT8 cache with a scale for each token and head.
FP8_QUERY = {**FP8, "backend": "vllm", "op_argument": "fp8_query", "num_blocks": None}
INT8 = {"backend": "vllm", "op_argument": "int8_per_token_head", "num_blocks": None}
DECODE_FWD = {"op": "decode_attention_fwd", "query_lens": (1, 1), "ctx_lens": (20, 5)}
FREED = {
    "sliding_window": 16,
    "freed": "recycled",
    "query_lens": (3, 20),
    "ctx_lens": (75, 50),
    "num_blocks": 30,
    "empty_slots": "nan",
}
MERGED = {"op": "merge_attn_states", "backend": "vllm", "query_lens": (1, 2), "ctx_lens": (20, 5)}
WRITE = {
    "op": "reshape_and_cache_flash",
    "backend": "vllm",
    "query_lens": (1, 2),
    "ctx_lens": (20, 5),
}
WRITE |= {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 32,
    "block_size": 16,
    "num_blocks": None,
}
# Of each Case the exit code of its script on 0.33.0: 0 right, 1 wrong, 2 undecided.
SCRIPTS = {
    "gqa": (UNIFIED, 0),
    "alibi, float32, pieces": (
        {**UNIFIED, "alibi": True, "dtype": "float32", "query_lens": (1, 1, 1)},
        0,
    ),
    "sinks": ({**UNIFIED, "sinks": True}, 0),
    "window": ({**UNIFIED, "sliding_window": 9}, 0),
    "mask": ({**UNIFIED, "mask": "ranges_in_window", "sliding_window": 5}, 0),
    "small soft cap": ({**UNIFIED, "softcap": 0.02, "dtype": "float32"}, 0),
    "sinks, soft cap": ({**UNIFIED, "softcap": 0.7, "sinks": True}, 0),
    "fp8": ({**UNIFIED, **FP8}, 0),
    "decode": ({"op": "decode_attention_fwd", "query_lens": (1, 1, 1)}, 0),
    "paged fp8": ({**DECODE, **FP8, "ctx_lens": (31,)}, 0),
    "int64": ({**DECODE, "ctx_lens": (31,), "stage": "int64"}, 0),
    "merge": ({**MERGED, "num_blocks": None}, 0),
    "encoder": ({**ENCODER, "sliding_window": 2}, 0),
    "encoder loses a window of one token": ({**ENCODER, "sliding_window": 1}, 1),
    "descriptors": (DESCRIPTORS, 0),
    "descriptors read NaN after the end": ({**DESCRIPTORS, "empty_slots": "nan"}, 1),
    "a window loses keys of later rows": (
        {**SHORT, "mask": "bidirectional", "sliding_window": 1},
        1,
    ),
    "Triton's interpreter cannot run a tree": (
        {**SHORT, "mask": "tree", "tree_parents": (0, 0)},
        2,
    ),
    "an FP8 query": ({**UNIFIED, **FP8_QUERY}, 0),
    "a decode has no scale of the query": ({**DECODE_FWD, **FP8_QUERY}, 1),
    "an encoder has no scale of its tokens": ({**ENCODER, "op_argument": "fp8_query"}, 1),
    "INT8": ({**UNIFIED, **INT8}, 0),
    "a decode has no scales of INT8": ({**DECODE_FWD, **INT8}, 1),
    "INT8 of a freed block is multiplied by 0": ({**UNIFIED, **INT8, **FREED}, 1),
    "freed blocks": ({**UNIFIED, **FREED}, 0),
    "a write": (WRITE, 0),
    "a write of a layout": ({**WRITE, "op_argument": "head_major_packed"}, 0),
    "a write of values of another width": ({**WRITE, "op_argument": "diffkv"}, 0),
    "a write ignores strides": ({**WRITE, "op_argument": "padded_tokens"}, 1),
    "a write of a layout ignores strides": (
        {**WRITE, "op_argument": "head_major_packed_spaced_values"},
        1,
    ),
    "Triton's interpreter rounds FP8 wrongly": ({**WRITE, **FP8}, 2),
    "NaN of a freed block is multiplied by 0": ({"op": "context_attention_fwd", **FREED}, 1),
}
# By mask: the argument that carries it, which an op with an INT4 cache ignores.
IGNORED = {
    "ranges_in_window": "mm_prefix_clamp_sliding_window",
    "prefix_and_window": "rswa_prefix_lens",
    "chunks": "chunk_lookback",
}
INT4 = Case(
    **UNIFIED,
    backend="vllm",
    op_argument="int4_per_token_head",
    num_heads=1,
    head_size=32,
    query_lens=(1,),
    ctx_lens=(4,),
    sliding_window=2,
    fill="all_rows",
)


@pytest.mark.releases
@pytest.mark.parametrize(
    "changes",
    [DECODE, {**DECODE, "sm_scale": None, "ctx_lens": (31,)}],
    ids=["unwritten slots", "default scale"],
)
def test_a_script_fails_before_and_passes_after(tmp_path: Path, changes) -> None:
    """The script of each fault of 0.11.2 exits with 1 and names the place there, and with 0 on 0.33.0."""
    script = written(tmp_path, CASE.replace(fill="all_rows", release="0.11.2", **changes))
    code, text = script_outcome(script, of_release("0.11.2"))
    assert (code, "1 of 1 rows are wrong" in text) == (1, True), text
    assert "sequence 0, new token 0: 128 of 128 elements are off" in text
    code, text = script_outcome(script, of_release("0.33.0"))
    assert (code, "every row is right" in text) == (0, True), text


@pytest.mark.releases
def test_a_script_of_an_overflow(tmp_path: Path) -> None:
    """In 0.11.2 a score above 88 times the soft cap becomes NaN."""
    case = CASE.replace(op="unified_attention", softcap=0.02, fill="all_rows", release="0.11.2")
    script = written(tmp_path, case.replace(empty_slots="zeros"), "wrong_output")
    for version, code in (("0.11.2", 1), ("0.33.0", 0)):
        got, text = script_outcome(script, of_release(version))
        assert got == code, text


@pytest.mark.releases
@pytest.mark.parametrize("version", ["0.11.2", "0.33.0"])
def test_a_script_of_alibi_with_sinks(tmp_path: Path, version: str) -> None:
    """unified_attention counts ALiBi from the first new token: only prefills are wrong."""
    fields = {"op": "unified_attention", "alibi": True, "sinks": True, "empty_slots": "zeros"}
    for query_lens, code in (((4, 1), 1), ((1, 1), 0)):
        lens = {"query_lens": query_lens, "ctx_lens": (5, 20)}
        case = CASE.replace(fill="all_rows", **fields, **lens)
        got, text = script_outcome(written(tmp_path, case, "wrong_output"), of_release(version))
        assert got == code, text


@pytest.mark.releases
@pytest.mark.parametrize(("changes", "code"), SCRIPTS.values(), ids=SCRIPTS)
def test_the_exit_code_of_a_script(tmp_path: Path, changes, code) -> None:
    """The reference and bound of the script hold for every feature that it implements."""
    case = CASE.replace(**{"fill": "all_rows", "empty_slots": "zeros", **changes})
    found, text = script_outcome(written(tmp_path, case), of_release("0.33.0"))
    assert found == code, text


@pytest.mark.releases
@pytest.mark.parametrize(
    ("changes", "right", "planted"),
    [
        (FP8_QUERY, "torch.tensor([query_scale]", "torch.tensor([2 * query_scale]"),
        (INT8, "with_gaps(by)", "with_gaps(1.1 * by)"),
    ],
    ids=["an FP8 query", "INT8"],
)
def test_a_script_sees_a_wrong_scale(tmp_path: Path, changes, right, planted) -> None:
    script = written(tmp_path, CASE.replace(fill="all_rows", **UNIFIED, **changes))
    text = script.read_text()
    call = text.rindex(right)
    script.write_text(f"{text[:call]}{planted}{text[call + len(right) :]}")
    code, printed = script_outcome(script, of_release("0.33.0"))
    assert (code, "rows are wrong" in printed) == (1, True), printed


@pytest.mark.releases
@pytest.mark.parametrize("mask", IGNORED)
def test_a_script_of_a_mask_that_0_33_0_ignores(tmp_path: Path, mask: str) -> None:
    """With an op that uses the argument, the script sees another output and passes."""
    script, call = written(tmp_path, INT4.replace(mask=mask)), "unified_attention(**given)"
    code, printed = script_outcome(script, of_release("0.33.0"))
    assert (code, f"{IGNORED[mask]} changes nothing" in printed) == (1, True), printed
    text, name = script.read_text(), IGNORED[mask]
    assert text.count(call) == 1
    used = f'given["out"] += int(given["{name}"] is arguments["{name}"])'
    script.write_text(text.replace(call, f"{call}\n    {used}"))
    code, printed = script_outcome(script, of_release("0.33.0"))
    assert code == 0, printed


@pytest.mark.releases
def test_a_release_without_the_argument_of_a_mask_cannot_tell(tmp_path: Path) -> None:
    script = written(tmp_path, INT4.replace(mask="chunks"))
    code, text = script_outcome(script, of_release("0.11.2"))
    assert (code, "no argument" in text) == (2, True), text


@pytest.mark.releases
def test_a_script_finds_an_error_above_rounding(tmp_path: Path) -> None:
    """With a scale that is 1 % off in the call but not in the reference, it exits with 1."""
    script = written(tmp_path, CASE.replace(fill="all_rows"))
    text = script.read_text()
    assert '"softmax_scale": 0.2' in text
    script.write_text(text.replace('"softmax_scale": 0.2', '"softmax_scale": 0.202'))
    assert script_outcome(script, of_release("0.33.0"))[0] == 1


def test_a_script_without_vllm_exits_with_2(tmp_path: Path) -> None:
    """It prints one line, and does not import attnlab."""
    script = written(tmp_path, CASE.replace(fill="all_rows"))
    tree = ast.parse(script.read_text())
    names = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert names == {"torch", "triton", "vllm", "inspect", "os", "sys"}
    command = [sys.executable, "-c", "import sys; sys.modules['vllm'] = None; import runpy;"]
    command[-1] += f" runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "cannot run here: " in done.stdout


def test_a_finding_without_a_script_has_a_text(tmp_path: Path) -> None:
    """A merge with gaps, a cache write with scales, and a case without its new tokens have no script."""
    for changes in (
        {"op": "merge_attn_states", "backend": "vllm", "op_argument": "gaps"},
        {**WRITE, "op_argument": "int8_per_token_head"},
        {"fill": "context_only"},
    ):
        case = CASE.replace(**changes)
        assert not has_script(case)
        found = Finding(op=case.op, kind="wrong_bytes", case=case, evidence="e", diagnosis="d")
        (file,) = write_reports([found], tmp_path / case.op, "vllm 0")
        assert "There is no script for this op or case" in file.read_text()


@pytest.mark.releases
def test_the_command_writes_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """attnlab check --report writes a script and a text for each finding and lists them."""
    old = of_release("0.11.2")
    words = [
        "check",
        "--source",
        str(old.path),
        "--op",
        "chunked_prefill_paged_decode",
        "--cases",
        "2",
    ]
    assert main([*words, "--json", "--report", str(tmp_path / "reports")]) == 1
    document = json.loads(capsys.readouterr().out)
    (finding,) = [one for one in document["findings"] if not one["horizon"]]
    assert [Path(file).suffix for file in document["reports"]] == [".py", ".md"]
    text = Path(document["reports"][1]).read_text()
    assert finding["evidence"].rstrip(".") in text
    assert "| vLLM | vllm 0.11.2" in text
    assert Path(document["reports"][0]).read_text() in text
    assert document["reads"]["chunked_prefill_paged_decode"]["unwritten_tail"] > 0


def test_bad_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refuse a file instead of a folder, and a report about the models."""
    (tmp_path / "file").write_text("")
    found = Finding(op=CASE.op, kind="fails", case=CASE, evidence="e", diagnosis="d")
    with pytest.raises(InvalidCase, match="report must be a folder that can be created"):
        write_reports([found], tmp_path / "file", "vllm 0")
    assert main(["check", "--report", str(tmp_path)]) == 2
    assert "report must be given with a library" in capsys.readouterr().err


# The mask in a script: its function and its data say the same as the Visibility of the call.


LENGTHS = {"query_lens": (5, 8, 1), "ctx_lens": (20, 9, 30)}
WINDOWS = {"ranges_in_window": 5, "prefix_and_window": 6, "chunks": 16}
CALLS = {
    **{name: {"sliding_window": WINDOWS.get(name, 0)} for name in MASKS if name != "causal"},
    "bidirectional": {"sliding_window": 7},
    "causal_by_sequence": {"causal_seqs": (0, 1, 0), "sliding_window": 4},
    "ranges": {"mm_prefix_range": ((2, 23), (9, 15), (0, 0)), "sliding_window": 3},
    "tree": {"tree_parents": (0, 0, 1, 1, 2, 3, 3, 4)},
}


@pytest.mark.parametrize("mask", CALLS)
def test_the_function_sees_what_the_call_says(mask):
    case = CASE.replace(mask=mask, fill="all_rows", backend="model", **LENGTHS, **CALLS[mask])
    assert has_script(case)
    call = Lab().call(case)
    facts = {**mask_facts(call), "sliding_window": case.sliding_window}
    names = {"torch": torch, "ctx_lens": LENGTHS["ctx_lens"], "seq_lens": call.seq_lens.tolist()}
    data = "\n".join(f"{name} = {text}" for name, text in facts["mask_data"].items())
    exec(f"{data}\n{render('mask.py.j2', facts)}", names)
    for seq in range(3):
        whole = mask_of(call, seq)
        expected = whole.visible(torch.arange(whole.ctx_len, whole.seq_len))
        assert torch.equal(names["visible"](seq), expected)


def test_a_tensor_as_text():
    given = torch.tensor([[0.5, -torch.inf], [torch.inf, 1.0]])
    assert torch.equal(eval(tensor_text(given), {"torch": torch}), given)


def test_a_causal_call_has_no_mask():
    assert mask_facts(Lab().call(CASE))["mask"] is None
