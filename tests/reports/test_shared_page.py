"""The page that gets sent, and its comment: what they say, and that nothing is loaded."""

from pathlib import Path

import pytest
import torch
from helpers.check_report import NEW, REPORT

import attnlab
from attnlab.checker.matrix import MatrixRow, MatrixTable
from attnlab.cli.main import main
from attnlab.contracts.slot_states import SlotState
from attnlab.lab.decode_error import decode_error
from attnlab.lab.lab import Lab
from attnlab.replay.random_comparison import Compared, Comparison, Outcome
from attnlab.reports.close_up import trace_run
from attnlab.reports.shared_page import (
    _MOST_LINES,
    comparison_pictures,
    error_picture,
    excerpt,
    matrix_pictures,
    page_of,
    slot_picture,
    text_pictures,
)

CASE = attnlab.Case(
    num_heads=4, query_lens=(17, 1), ctx_lens=(16, 40), stage="int32_before_cumsum", atol=1e-4
)


@pytest.fixture(scope="module")
def diagnosis() -> object:
    return attnlab.diagnose(CASE)


def test_the_page_states_cause_evidence_and_command(diagnosis: object, tmp_path: Path) -> None:
    page = page_of(diagnosis, "attnlab diagnose --x '<1>'", run=trace_run(Lab(), CASE))
    page.write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert page.cause == diagnosis.sentences()[0]
    assert "query_start_loc_as_int32" in text
    assert 'attnlab diagnose <span class="flag">--x</span> &#39;&lt;1&gt;&#39;' in text
    assert "known faults would give other numbers" in text
    assert not any(word in text for word in ("http://", "https://", 'src="/', "<link", "@import"))
    assert len(text) < 1_000_000


def test_the_picture_marks_the_wrong_cells_alone() -> None:
    result = attnlab.run(CASE)
    wrong = int((result.compare_with_rounding().mismatches > 0).sum())
    assert wrong > 0
    errors = result.compare_with_rounding()
    picture = error_picture(errors.lengths, errors.error, errors.mismatches > 0)
    assert picture.svg.count('<g class="wrong"') == wrong
    assert picture.svg.count("<path") == wrong
    assert f"{wrong // 4} of 18 rows and 4 of 4 heads are wrong" in picture.title


def test_a_slot_of_another_sequence_is_marked() -> None:
    """A right map has no mark; a planted read of another sequence has one, of an empty slot another."""
    found = attnlab.run(CASE).slot_map()
    right = slot_picture(found)
    assert '<g class="wrong">' not in right.svg
    assert right.title.startswith("every slot that was read")
    block, slot = torch.nonzero(found.is_read)[0].tolist()
    found.states[block, slot] = SlotState.OTHER_SEQUENCE.code
    assert slot_picture(found).svg.count('<g class="wrong">') == 1
    found.states[block, slot] = SlotState.UNWRITTEN_TAIL.code
    assert slot_picture(found).svg.count('<g class="off">') == 1
    assert '<g class="wrong">' not in slot_picture(found).svg


@pytest.mark.parametrize(
    ("text", "op", "label", "marked"),
    [
        ("at index (17, 2, 1)", "chunked_prefill_paged_decode", "token 0, head 2", 1),
        ("at index (3, 5, 1, 7)", "reshape_and_cache_flash", "block 3, offset 5", 1),
        ("expected scalar type Int but found Long", "chunked_prefill_paged_decode", "int64: ", 2),
    ],
)
def test_what_the_text_of_a_failed_test_names_is_drawn(text, op, label, marked) -> None:
    case = attnlab.Case(
        op=op, platform="gfx942", num_heads=4, query_lens=(17, 1), ctx_lens=(16, 40)
    )
    (picture,) = text_pictures(decode_error(f"Greatest absolute difference: 1 {text}", case), case)
    cells = picture.svg.split('<g class="wrong"')[1:]
    assert len(cells) == marked
    assert all(f"<title>{label}" in cell.partition("</g>")[0] for cell in cells)


def test_a_failed_allclose_has_no_picture() -> None:
    assert text_pictures(decode_error("assert torch.allclose(a, b)", CASE), CASE) == ()


def test_the_ids_that_do_not_match_are_drawn() -> None:
    statuses = {"f16-64": "match", "f16-80": "rejected", "bf16-64": "not run"}
    rows = tuple(MatrixRow(id=f"test_a[{one}]", status=s) for one, s in statuses.items())
    other = MatrixRow(id="test_b[1]", status="match")
    drawn = matrix_pictures(MatrixTable(rows=(*rows, other), seconds=0.0, changes={}))
    assert [one.title for one in drawn] == [
        "1 of 3 ids of test_a do not match",
        "0 of 1 ids of test_b do not match",
    ]
    assert [name for name, _ in drawn[0].legend] == ["wrong", "right", "idle"]
    assert drawn[0].svg.count("<rect") == 3
    assert drawn[0].svg.count('<g class="wrong"><title>test_a[f16-80]: rejected<') == 1


def test_the_cases_in_which_a_kernel_is_wrong_are_drawn() -> None:
    """Those with a difference first, as in the table."""
    right, wrong = Outcome(status="match"), Outcome(status="rejected", reason="no")
    cases = [Compared(case=CASE, outcomes=(right, one)) for one in (right, wrong, right)]
    found = Comparison(names=("mine", "other"), cases=tuple(cases), left_out={})
    (picture,) = comparison_pictures(found.names, found.marks())
    first, second = picture.svg.split('<th scope="row">')[1:]
    assert (first.count('<g class="wrong"'), second.count('<g class="wrong"')) == (0, 1)
    assert second.index('<g class="wrong"') < second.index('<g class="right"')
    assert "rejected: no" in second
    assert comparison_pictures(found.names, []) == ()


def test_the_comment_of_a_check_has_the_smallest_cases() -> None:
    text = page_of(REPORT, "attnlab check").markdown()
    assert f"```sh\n{NEW.command}\nattnlab check\n```" in text
    assert text.count(NEW.evidence.partition(" by ")[0]) == 2  # the cause, the finding
    assert len(text.splitlines()) <= _MOST_LINES


def test_the_comment_has_at_most_25_lines(diagnosis: object) -> None:
    text = page_of(diagnosis, "attnlab diagnose").markdown()
    assert text.startswith("**query_start_loc_as_int32")
    assert "```sh\nattnlab diagnose\n```" in text
    assert len(text.splitlines()) <= _MOST_LINES


def test_an_excerpt_has_the_line_and_its_surroundings() -> None:
    found = excerpt(__file__, 3)
    assert found.lines[found.line - found.first] == "from pathlib import Path"
    assert excerpt(__file__, 10**6) is None


SMALL = ["--num-heads", "2", "--query-lens", "5,1", "--ctx-lens", "40,33"]


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", *SMALL, "--stage", "int32_before_cumsum"],
        ["matrix", "test_contexted_kv_attention[context_attention_fwd-16-cuda:0-auto-dtype0-24-64-64]",
         "--draw-max-query-len", "20", "--draw-max-ctx-len", "20"],
        ["decode-error", "failure.txt", *SMALL],
        ["replay", "call.safetensors"],
        ["shrink", "call.safetensors", "--backend", "model", "--seconds", "5"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_command_writes_a_page_and_a_comment(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["attnlab", *words, "--html", "page.html"])
    Path("failure.txt").write_text("Greatest absolute difference: 1.6 at index (5, 0, 0)\n")
    attnlab.run(CASE.replace(stage="sound")).recorded_call.save(Path("call.safetensors"))
    assert main([*words, "--html", "page.html", "--markdown", "page.md"]) in (0, 1)
    assert f"attnlab {words[0]}" in Path("page.html").read_text()
    assert "page.html" not in Path("page.md").read_text()
    assert len(Path("page.md").read_text().splitlines()) <= _MOST_LINES


def test_a_page_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *SMALL, "--html", "/no/such/folder/x.html"]) == 2
    assert "html must" in capsys.readouterr().err


def test_notes_stay_on_a_page_that_is_written_again(tmp_path: Path) -> None:
    """The page of a call has its reproduction, or why there is none; an empty note removes one."""
    call, page, notes = (
        tmp_path / "call.safetensors",
        tmp_path / "page.html",
        tmp_path / "notes.toml",
    )
    assert main(["run", *SMALL, "--stage", "int32_before_cumsum", "--save-call", str(call)]) == 1
    notes.write_text('since = "0.9.0"\n')
    words = ["page", str(call), "--html", str(page)]
    assert main([*words, "--note", str(notes), "--note", "owner=</script>"]) == 1
    assert "<dd>0.9.0</dd>" in page.read_text()
    assert main([*words, "--note", "status=open", "--note", "since="]) == 1
    text = page.read_text()
    assert "<dt>Owner</dt><dd>&lt;/script&gt;</dd>" in text
    assert "<dt>Status</dt><dd>open</dd>" in text
    assert "0.9.0" not in text
    assert "There is no script: a script calls a kernel" in text
    assert main([*words, "--note", "colour=red"]) == 2
