"""Reports for upstream: the script fails if the bug is present, passes otherwise, and does not import
attnlab."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sources import needs_triton, of_release
from helpers.triton_example import CASE
from helpers.upstream import script_outcome, written

from attnlab.case.errors import InvalidCase
from attnlab.checker.finding import Finding
from attnlab.cli.main import main
from attnlab.reports.upstream import has_script, write_reports

pytestmark = needs_triton

DECODE = {
    "op": "chunked_prefill_paged_decode",
    "query_lens": (1,),
    "ctx_lens": (20,),
    "num_blocks": 3,
}
RIGHT = {  # cases in which 0.33.0 is correct
    "gqa": {"op": "unified_attention"},
    "alibi, float32, pieces": {
        "op": "unified_attention",
        "alibi": True,
        "dtype": "float32",
        "query_lens": (1, 1, 1),
    },
    "sinks": {"op": "unified_attention", "sinks": True},
    "window": {"op": "unified_attention", "sliding_window": 9},
    "mask": {"op": "unified_attention", "mask": "ranges_in_window", "sliding_window": 5},
    "small soft cap": {"op": "unified_attention", "softcap": 0.02, "dtype": "float32"},
    "sinks, soft cap": {"op": "unified_attention", "softcap": 0.7, "sinks": True},
    "fp8": {"op": "unified_attention", "kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0},
    "decode": {"op": "decode_attention_fwd", "query_lens": (1, 1, 1)},
    "paged fp8": {
        **DECODE,
        "kv_cache_dtype": "fp8",
        "k_scale": 0.25,
        "v_scale": 2.0,
        "ctx_lens": (31,),
    },
    "int64": {**DECODE, "ctx_lens": (31,), "stage": "int64"},
}


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
def test_a_script_of_a_mask(tmp_path: Path) -> None:
    """A two-sided window loses keys of later rows. Triton's interpreter cannot run the bias of a tree."""
    fields = {"op": "unified_attention", "fill": "all_rows", "empty_slots": "zeros"}
    lens = {"query_lens": (2,), "ctx_lens": (0,), "num_blocks": None}
    for changes, code in (
        ({"mask": "bidirectional", "sliding_window": 1}, 1),
        ({"mask": "tree", "tree_parents": (0, 0)}, 2),
    ):
        script = written(tmp_path, CASE.replace(**fields, **lens, **changes), "wrong_output")
        got, text = script_outcome(script, of_release("0.33.0"))
        assert got == code, text


@pytest.mark.releases
def test_freed_blocks_in_a_script(tmp_path: Path) -> None:
    """0.33.0's context_attention_fwd multiplies a freed block's NaN by 0; its unified_attention does not."""
    fields = {
        "sliding_window": 16,
        "freed": "recycled",
        "query_lens": (3, 20),
        "ctx_lens": (75, 50),
    }
    newest = of_release("0.33.0")
    for op, code in (("context_attention_fwd", 1), ("unified_attention", 0)):
        case = CASE.replace(op=op, num_blocks=30, fill="all_rows", **fields)
        got, text = script_outcome(written(tmp_path, case, "reads_freed_blocks"), newest)
        assert got == code, text


@pytest.mark.releases
@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_a_script_passes_if_nothing_is_wrong(tmp_path: Path, changes) -> None:
    """The reference and bound of the script hold for every feature that it implements."""
    case = CASE.replace(**{"fill": "all_rows", "empty_slots": "zeros", **changes})
    code, text = script_outcome(written(tmp_path, case), of_release("0.33.0"))
    assert code == 0, text


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
    """A merge, a cache write, and a case without its new tokens have no script."""
    for changes in (
        {"op": "merge_attn_states", "backend": "vllm", "op_argument": "gaps"},
        {"op": "reshape_and_cache_flash"},
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
    assert "report must be given with a vLLM" in capsys.readouterr().err
