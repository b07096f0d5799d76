"""Each noun displays the same facts in a notebook, in a terminal and in one line."""

import dataclasses
import importlib
import pkgutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from helpers.cases import hostile
from helpers.html import Page
from helpers.release_table import TABLE
from helpers.state_models import ModelRunner
from rich.console import Console

import attnlab
from attnlab.case.case import Case
from attnlab.case.shown import Shown
from attnlab.checker.finding import Finding
from attnlab.checker.matrix import MatrixRow, MatrixTable
from attnlab.checker.report import Report
from attnlab.contracts.contract import Target, contract
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import Violation, Violations, find_violations
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import run_again
from attnlab.horizon.deployment import PRESETS
from attnlab.horizon.survey import KernelHorizon, Survey
from attnlab.lab.decode_error import decode_error
from attnlab.lab.lab import Lab, stage_table
from attnlab.lab.writes import WriteCase, WriteReport, WriteResult
from attnlab.linear.state_call import make_call
from attnlab.linear.state_case import StateCase
from attnlab.linear.state_check import StateFinding, StateReport, StateXRay
from attnlab.linear.state_claims import measure
from attnlab.mla.run import MlaReport, VariantResult
from attnlab.mutation.power import Mutant, MutationReport
from attnlab.replay.random_comparison import MATCH, Compared, Comparison
from attnlab.replay.random_comparison import Outcome as Ran
from attnlab.reports.notebook_result import Change, Outcome, Results
from attnlab.serving.capture_state import Observation
from attnlab.serving.report import CaptureReport, Found, ProcessRecord
from attnlab.show.notebook import Verdict, Verdicts
from attnlab.show.sheets import SHEETS, html, line, plain, render, sheet_of, text
from attnlab.show.sheets.results import contents, describe, place_lines
from attnlab.show.sheets.sheet import Bar, Facts, Folded, Grid, Lines, Sheet, Words
from attnlab.tensors.call import KernelCall
from study.claims.ledger import Claim, Findings
from study.claims.ledger import Finding as ClaimFinding
from study.overview import Chapter, Chapters

CAPTURED = CaptureReport(
    folder="found",
    found=(
        Found(
            first=Observation(
                kind="value",
                text="the output is off by <1>",
                layer="layers.0",
                step=3,
                request="r",
                facts={"call": "calls/x.safetensors"},
            ),
            layers=("layers.0", "layers.2"),
            times=5,
            last_step=9,
            diagnosis="explained",
        ),
    ),
    processes=(ProcessRecord(name="p", started={"rank": 0}, counts={"steps": 9}, worst=7.0),),
    unchecked={"values of x": 2},
    notes=("a note",),
    errors=("an error",),
    exit_code=0,
)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


@pytest.fixture(scope="module")
def case() -> Case:
    """Return a small batch like the test's, in the stage that failed."""
    return Case(
        num_heads=4, query_lens=(33, 1), ctx_lens=(40, 65), stage="int32_before_cumsum", x=8
    )


@pytest.fixture(scope="module")
def nouns(lab: Lab, case: Case) -> dict[str, Shown]:
    """Return one of each noun, by its dotted name."""
    result, target = lab.run(case), Target.of(case)
    states = StateCase(query_lens=(1, 1))
    wrong_state = StateFinding(
        op=states.op, kind="wrong_state", title="slot <3> is stale", is_rule=True, case=states,
        reasons=("few tokens",), evidence="7 × its bound",
    )  # fmt: skip
    claim = Claim(number="C1", text="<b>all</b> is well", notes="000 & 001")
    judged = ClaimFinding(
        claim=claim, verdict="fails", reading="1 < 2", rests_on="a model", evidence={"n": [1, 2]}
    )
    finding = Finding(
        op=case.op, kind="wrong_output", case=case, evidence="row 3 is <off>", diagnosis="x", seen=4
    )
    mutant = Mutant(name="scale_doubled", text="t", outcome="survived", effect=1e-9, margin=0.5)
    outcome = Outcome(
        name="01-x",
        title="X",
        status="failed",
        message="1 verdict <differs>",
        verdicts=[Verdict(name="rows", expected=1, found=2, evidence={"heads": [0, 1]})],
        seconds=2.0,
        executed=Path("x.ipynb"),
        html=Path("x.html"),
    )
    chain = attnlab.run_mla(attnlab.MlaCase(num_heads=1), fault="weights_exchanged")
    made = [
        case,
        lab.batch(case),
        lab.cache(case).provenance,
        lab.cache(case),
        lab.call(case),
        decide(case),
        contract("paged_attention_rocm", target, case.op),
        result.violations,
        result.errors,
        result,
        stage_table(lab, case),
        MatrixTable(
            rows=(
                MatrixRow.of("test_a[False-128-1]", result),
                MatrixRow(id="test_a[True-64-1]", status="rejected", error="a < b"),
                MatrixRow(id="test_b[2]", status="not run", error="no <Case>"),
            ),
            seconds=1.0,
            changes={"platform": "gfx942"},
            backend="model",
        ),
        diagnose(case, lab=lab, propose=False),
        run_again(lab, case, result.output, {"empty_slots": "garbage"}),
        MutationReport(case=case, mutants=[mutant], sampled=(3, 34), heads=2),
        judged,
        Findings([judged]),
        finding,
        Chapters(
            [
                Chapter(
                    notebook="01-x.ipynb", question="a < b?", claims=("C1",), verdict="v", facts={}
                )
            ]
        ),
        Report(
            source="s",
            version="vLLM <x>",
            cases_run=3,
            seconds=1.0,
            findings=[finding],
            reads={"unified_attention": {"own": 7, "own_future": 2, "never_mapped": 0}},
            reads_allowed={"unified_attention": ["own"]},
            forms={"unified_attention": {"kernel": 2, "kernel + reduce_segments": 1}},
            reports=["reports/01.md"],
            left_out=["first <op>", "second", "third", "fourth", "fifth", "sixth"],
        ),
        decode_error(result.errors.message(), case),
        decode_error("assert torch.allclose(a, b)", case),
        attnlab.xray(
            case.replace(op="context_attention_fwd", num_heads=2, head_size=32), confirm=False
        ),
        dataclasses.replace(TABLE, releases=TABLE.releases[:3]),
        attnlab.replay_call(lab.call(case.replace(stage="sound"))),
        attnlab.shrink_call(result.call, seconds=1.0),
        attnlab.probe_call(lab.call(case.replace(stage="sound"))),
        CAPTURED,
        chain,
        MlaReport(
            release="0.33.0",
            backend="model",
            results=(VariantResult(reason="a < b", case=chain.case, result=chain),),
        ),
        WriteReport(
            backend="model",
            results=(
                WriteResult(
                    name="one <write>", case=WriteCase(cache_format="diffkv"), wrong={"numbers": 3}
                ),
            ),
        ),
        Survey(
            source="a <b>",
            kernels=[KernelHorizon(kernel="k", file="a.py", line=3, launch=None, why="no <name>")],
            deployment=PRESETS["phi-4"],
            broken={},
            seconds=1.0,
        ),
        Comparison(
            names=("a <b>", "model"),
            cases=(Compared(case=case, outcomes=(Ran(status=MATCH), Ran(status=MATCH))),),
            left_out={"no <op>": 2},
        ),
        outcome.verdicts[0],
        wrong_state,
        StateReport(
            source="<src>",
            ops={states.op: 2},
            findings=(wrong_state,),
            left_out=("a limit",),
            not_run=("no <op>",),
            seconds=1.0,
        ),
        StateXRay(
            case=states,
            source="<src>",
            status="wrong",
            sentences=("row 0 sees <slot> 3",),
            worst=7.0,
            worst_weight=float("inf"),
            weights=measure(make_call(states), ModelRunner()),
        ),
        Verdicts(),
        Results(
            outcomes=[outcome],
            baseline="b.json",
            changes=[Change(notebook="01-x", verdict="rows", kind="broken", before=1, after=2)],
        ),
    ]
    return {f"{type(one).__module__}.{type(one).__qualname__}": one for one in made}


def squeezed(words: str) -> str:
    """Return text with single spaces, so that line breaks do not matter."""
    return " ".join(words.split())


def printed(noun: Shown, width: int = 200) -> str:
    """Return what a command prints for a noun."""
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(text(noun, complete=True))
    return out.getvalue()


OWN = {  # nouns with a method `sheet`
    "attnlab.replay.random_comparison.Comparison",
    "attnlab.reports.notebook_result.Results",
    "attnlab.show.notebook.Verdict",
    "attnlab.show.notebook.Verdicts",
}
OF_STUDY = {
    "study.claims.ledger.Finding",
    "study.claims.ledger.Findings",
    "study.overview.Chapters",
}


@pytest.mark.parametrize("name", sorted({*SHEETS} | OWN | OF_STUDY))
def test_a_noun_is_displayed_everywhere(nouns: dict[str, Shown], name: str) -> None:
    """HTML is well formed and short, the repr has one line, and none of them contains a tensor."""
    noun, sheet = nouns[name], sheet_of(nouns[name])
    page, shown = Page(noun._repr_html_()), plain(noun)
    assert len(noun._repr_html_()) < 40_000
    assert "\n" not in repr(noun)
    assert len(repr(noun)) < 300
    assert "tensor(" not in page.text + shown + repr(noun)
    for words in (sheet.kind, str(getattr(sheet.head, "text", sheet.head))):
        assert words
        assert words in page.text
        assert words in squeezed(shown)
    out = StringIO()
    Console(file=out, width=110, color_system=None).print(noun)
    assert out.getvalue().rstrip().splitlines()[0].rstrip() == shown.splitlines()[0]


def test_every_noun_that_displays_itself_has_a_sheet() -> None:
    """Each subclass of Shown has a method or an entry of SHEETS, and each entry is a subclass of Shown."""
    for module in pkgutil.walk_packages(attnlab.__path__, "attnlab."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in leaves(Shown)}
    # Bases of Case. @dataclass(slots=True) replaces a class, and the replaced one has no subclasses.
    bases = {"attnlab.case.declaration.CaseFields", "attnlab.case.case.CaseQuantities"}
    own = {name for name in kinds if name.startswith("attnlab.")} - bases
    assert own == {*SHEETS, "attnlab.show.sheets.sheet.Sheet"} | OWN


def leaves(kind: type) -> list[type]:
    """Return the subclasses of a class that have no subclasses."""
    below = kind.__subclasses__()
    return [leaf for sub in below for leaf in leaves(sub)] if below else [kind]


def test_a_result_shows_case_kernels_violations_and_places(nouns: dict[str, Shown]) -> None:
    result = nouns["attnlab.lab.result.Result"]
    facts = [
        result.verdict,
        describe(result.case),
        *result.decision.kernels,
        *(violation.text for violation in result.violations),
        *place_lines(result.places()),
    ]
    page = Page(html(result)).text
    for fact in facts:
        assert squeezed(fact) in page
        assert squeezed(fact) in squeezed(printed(result, width=500))


def test_a_stage_table_shows_its_case_and_each_outcome(nouns: dict[str, Shown]) -> None:
    table = nouns["attnlab.lab.lab.StageTable"]
    page = Page(html(table)).text
    assert table.case.release in page
    for cell in table:
        assert cell.stage in page
        assert cell.verdict in page


def test_a_diagnosis_prints_the_candidates_that_are_left(nouns: dict[str, Shown]) -> None:
    """Of the excluded ones, the nearest are shown, and the number of all."""
    diagnosis = nouns["attnlab.diagnosis.diagnosis.Diagnosis"]
    text = printed(diagnosis)
    excluded = [one for one in diagnosis.candidates if one.verdict.startswith("excluded")]
    left = [one for one in diagnosis.candidates if one not in excluded]
    assert left
    assert all(candidate.name in text for candidate in left)
    assert sum(candidate.name in text for candidate in excluded) < len(excluded)
    assert f"{diagnosis.counts()['excluded by value']} excluded by value" in text


def test_a_report_highlights_reads_that_no_contract_allows(nouns: dict[str, Shown]) -> None:
    page = html(nouns["attnlab.checker.report.Report"])
    assert ["unified_attention", "7 own2 own future"] in Page(page).rows
    assert 'font-weight:600">2 own future</span>' in page
    assert 'font-weight:600">7 own</span>' not in page


def test_a_report_lists_files_and_what_was_not_checked(nouns: dict[str, Shown]) -> None:
    report = nouns["attnlab.checker.report.Report"]
    for words in (*report.reports, *report.left_out):
        assert words in printed(report)
        assert words in Page(html(report)).text


def test_a_decoded_error_shows_all_its_sentences(nouns: dict[str, Shown]) -> None:
    decoded = nouns["attnlab.lab.decode_error.DecodedError"]
    assert (decoded.seq, decoded.token, decoded.row) == (1, 0, 33)
    for sentence in decoded.sentences():
        assert squeezed(sentence) in Page(html(decoded)).text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "attnlab.reports.notebook_result.Results",
            [
                ["", "✗ rows", "1", "2"],
                ["", "1 verdict <differs>", "", ""],
                ["01-x", "rows", "broken", "1", "2"],
            ],
        ),
        (
            "attnlab.lab.result.ErrorMap",
            [["0", "40", "33", "0", "0"], ["1", "65", "1", "1", "512"]],
        ),
        (
            "attnlab.tensors.call.KernelCall",
            [
                ["query_start_loc", "3", "int64", "1", "0, 33, 34"],
                ["key_cache", "6 × 4 × 16 × 32 × 8", "float16"],
                ["sm_scale"],
            ],
        ),
    ],
    ids=["results", "error map", "call"],
)
def test_a_table_has_these_rows(nouns: dict[str, Shown], name, expected) -> None:
    rows = Page(html(nouns[name])).rows
    assert all(row in [one[: len(row)] for one in rows] for row in expected)


def test_violations_are_a_list(case: Case, lab: Lab) -> None:
    sound = case.replace(stage="sound")
    found = find_violations(lab.call(sound), Target.of(sound), decide(sound).kernels)
    assert found == []
    assert "none" in Page(html(found)).text
    assert [one.effect for one in lab.run(case).violations] == ["silent", "silent"]
    copied = dataclasses.asdict(diagnose(case, lab=lab, propose=False))["violations"]
    assert type(copied) is Violations


def test_ipython_shows_text_for_one_and_a_line_inside_a_list(nouns: dict[str, Shown]) -> None:
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    for noun in nouns.values():
        assert pretty(noun) == plain(noun)
        assert repr(noun) in pretty([noun])


def test_the_repr_of_a_lab_has_no_tensors(lab: Lab, case: Case) -> None:
    lab.run(case)
    assert "tensor(" not in repr(lab)


# Rendering a sheet: HTML that is well formed and escaped, text without markup.


SHEET = Sheet(
    kind="<K>",
    line="<K: a<b>",
    head=Words("a<b", "bad"),
    parts=[
        Facts([("n<", ["1", Words("2>", "quiet")])]),
        Grid(["i", "bar"], [[i, Bar(i, 1, 9, f"{i}<")] for i in range(9)], "t<", most=3),
        Lines([Words("[b]x<y", code=True)]),
        Folded("more<", [Lines(["inside"])]),
    ],
)


def shown_text(complete: bool) -> str:
    """Return the sheet as a terminal shows it."""
    out = StringIO()
    Console(file=out, width=80, color_system=None).print(
        render.render_text(SHEET, complete=complete)
    )
    return out.getvalue()


@pytest.mark.parametrize("bad", ["<b>x", "<table><tr></table>", "x</div>", "<script></script>"])
def test_the_check_of_html_finds_planted_faults(bad):
    with pytest.raises((AssertionError, IndexError)):
        Page(f"<div>{bad}</div>" if bad[0] == "<" else bad)


def test_html_has_everything_escaped():
    html = render.render_html(SHEET)
    page = Page(html)
    for piece in ("<K>", "a<b", "n<", "2>", "t<", "[b]x<y", "more<", "inside", "6 more rows", "8<"):
        assert piece in page.texts
    assert "<K>" not in html


def test_html_aligns_numbers_and_draws_bars():
    html = render.render_html(SHEET)
    assert html.count('<td class="n">') == 9
    assert html.count("<rect") == 8 + 9  # a bar with context 0 has one part


def test_the_class_names_the_kind():
    assert 'class="attnlab-sheet attnlab-k"' in render.render_html(SHEET)


def test_text_omits_folded_parts_and_rows():
    text = shown_text(complete=False)
    assert all(part in text for part in ("a<b", "[b]x<y", "… and 6 more rows", "█"))
    assert "inside" not in text


def test_complete_text_has_every_row():
    assert shown_text(complete=True).count("█") == 3 * 9
    assert shown_text(complete=False).count("█") == 3 * 3
    assert "more rows" not in shown_text(complete=True)


def test_a_sheet_displays_itself():
    assert repr(SHEET) == SHEET.line
    assert SHEET._repr_html_() == render.render_html(SHEET)


# Contents of tensors, batches and violations in a sheet.


def test_a_noun_without_a_sheet_is_an_error() -> None:
    with pytest.raises(TypeError, match="Stranger"):
        line(type("Stranger", (Shown,), {})())


def test_a_batch_of_the_real_size_stays_short() -> None:
    """The page of a batch with 300 sequences is short, and folds most rows."""
    shape = Case(query_lens=(1,) * 300, ctx_lens=(3,) * 300, num_heads=2, head_size=64)
    batch = Lab().batch(shape)
    page = batch._repr_html_()
    Page(page)
    assert len(page) < 100_000
    assert "288 more rows" in page
    assert "… and 88 more" in page
    assert page.count("<svg") == 12 + 200
    assert len(plain(batch).splitlines()) < 25


def test_a_table_of_violations_escapes_its_text() -> None:
    """No text becomes markup, in HTML or in the terminal."""
    found = Violations(
        [
            Violation(
                kind="unsupported",
                effect="silent",
                kernel="[bold]a & b</td>",
                parameter="<u>[red]",
                value=1,
                required=2,
            )
        ]
    )
    page = html(found)
    assert "<u>" not in page
    assert "</td></td>" not in page
    assert "[bold]a & b</td>" in Page(page).text
    assert "<u>[red]" in plain(found)
    assert "[bold]a & b</td>" in plain(found)


def test_the_repr_of_a_case_makes_the_case_again() -> None:
    for one in (Case(), hostile(), Case(sm_scale=0.5, kv_head_range=(0, 2), backend="vllm")):
        assert eval(repr(one), {"Case": Case}) == one


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 0), "no elements"),
        (torch.tensor([3, 1, 2]), "3, 1, 2"),
        (torch.tensor([0.5, 1e-9]), "0.5, 1e-09"),
        (torch.zeros(3, 3), "zeros"),
        (torch.arange(40), "0 to 39"),
        (torch.full((2, 2), float("nan")), "NaN everywhere"),
        (torch.tensor([[1.0, float("nan")], [-2.0, 0.0]]), "-2 to 1; 1 NaN"),
        (torch.tensor([[1.0, float("inf")]]), "1 to inf"),
        (torch.tensor([[0x7F, 3]], dtype=torch.uint8), "3 to 127"),
    ],
)
def test_contents_of_a_tensor(tensor: torch.Tensor, expected: str) -> None:
    assert contents(tensor) == expected


def test_a_noun_is_displayed_without_importing_the_sheets() -> None:
    code = "from attnlab.case.case import Case; print(Case()._repr_html_()[:5], repr(Case(seed=3)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert done == "<div  Case(seed=3)\n"


def test_placeholders_of_new_tokens_have_no_row() -> None:
    """An op that reads new tokens from the cache may get none."""
    case = Case(op="unified_attention", num_heads=2, query_lens=(3, 1), ctx_lens=(4, 5))
    call = Lab().call(case)
    assert {"key", "value"} <= names_of_tensors(call)
    zero = call.query.new_zeros(()).expand(call.key.shape)
    found = names_of_tensors(dataclasses.replace(call, key=zero, value=zero))
    assert found == names_of_tensors(call) - {"key", "value"}


def names_of_tensors(call: KernelCall) -> set[str]:
    """Return the tensors in the table of a call."""
    (grid,) = (part for part in sheet_of(call).parts if isinstance(part, Grid))
    return {str(row[0]) for row in grid.rows}
