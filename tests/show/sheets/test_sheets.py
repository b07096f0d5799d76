"""Nouns show themselves: the same facts in a notebook, in a terminal and in one line."""

import dataclasses
import importlib
import pkgutil
import subprocess
import sys
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import pytest
import torch
from helpers.cases import hostile
from rich.console import Console

import attnlab
from attnlab.case.case import Case
from attnlab.case.shown import Shown
from attnlab.checker.finding import Finding
from attnlab.checker.library import Report
from attnlab.contracts.dispatch import decide
from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.target import Target
from attnlab.contracts.violation import Violation, Violations
from attnlab.contracts.violations import find_violations
from attnlab.diagnosis.diagnose import diagnose
from attnlab.lab.lab import Lab
from attnlab.lab.stage_table import stage_table
from attnlab.mutation.power import Mutant, MutationReport
from attnlab.show.sheets import SHEETS, as_text, html, line, plain, sheet_of
from attnlab.show.sheets.as_html import render
from attnlab.show.sheets.inputs import contents
from attnlab.show.sheets.sheet import Bar, Facts, Folded, Grid, Lines, Sheet, Words
from attnlab.study.claims.ledger import Claim, Findings
from attnlab.study.claims.ledger import Finding as ClaimFinding
from attnlab.study.overview import Chapter, Chapters

VOID = {"br", "hr", "img", "rect", "input"}


class Page(HTMLParser):
    """Hold a piece of HTML to its tags: each is closed in its turn; keep its text and its rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "rect":
            return
        assert all(
            not name.startswith("on") and "url(" not in (value or "") for name, value in attrs
        )
        assert tag not in ("script", "link", "iframe", "img", "object")
        self.open += [tag] if tag not in VOID else []
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert tag == "rect" or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)
            if {"td", "th"} & {*self.open}:
                self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.mark.parametrize("bad", ["<b>x", "<table><tr></table>", "x</div>", "<script></script>"])
def test_the_check_of_html_sees_what_is_wrong(bad: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        Page(f"<div>{bad}</div>" if bad[0] == "<" else bad)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


@pytest.fixture(scope="module")
def case() -> Case:
    """A batch of the form of the test's, in the state that failed."""
    return Case(
        num_heads=4, query_lens=(33, 1), ctx_lens=(40, 65), stage="int32_before_cumsum", x=8
    )


@pytest.fixture(scope="module")
def nouns(lab: Lab, case: Case) -> dict[str, Shown]:
    """One of each noun, by its place in the package."""
    result, target = lab.run(case), Target.of(case)
    claim = Claim(number="C1", text="<b>all</b> is well", notes="000 & 001")
    judged = ClaimFinding(
        claim=claim, verdict="fails", reading="1 < 2", rests_on="a model", evidence={"n": [1, 2]}
    )
    finding = Finding(
        op=case.op, kind="wrong_output", case=case, evidence="row 3 is <off>", diagnosis="x", seen=4
    )
    mutant = Mutant(name="scale_doubled", text="t", outcome="survived", effect=1e-9, margin=0.5)
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
        diagnose(case, lab=lab, propose=False),
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
        ),
    ]
    return {f"{type(one).__module__}.{type(one).__qualname__}": one for one in made}


@pytest.mark.parametrize("name", SHEETS)
def test_a_noun_shows_itself_everywhere(nouns: dict[str, Shown], name: str) -> None:
    """HTML that holds, short; text without a tensor; a repr of one line; and the same facts in both."""
    noun = nouns[name]
    page = Page(noun._repr_html_())
    assert len(noun._repr_html_()) < 40_000
    told = plain(noun)
    assert "\n" not in repr(noun)
    assert len(repr(noun)) < 300
    assert "tensor(" not in page.text + told + repr(noun)
    for text in (
        sheet_of(noun).kind,
        str(getattr(sheet_of(noun).head, "text", sheet_of(noun).head)),
    ):
        assert text in " ".join(page.text.split())
        assert text in " ".join(told.split())
    out = StringIO()
    Console(file=out, width=110, color_system=None).print(noun)
    assert out.getvalue().rstrip().splitlines()[0].rstrip() == told.splitlines()[0]


def test_every_noun_that_shows_itself_has_a_sheet() -> None:
    """No class of the package takes Shown without being named, and none is named that does not."""
    for module in pkgutil.walk_packages(attnlab.__path__, "attnlab."):
        if "hip.cpp" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in Shown.__subclasses__()}
    assert {name for name in kinds if name.startswith("attnlab.")} == {*SHEETS}


def test_a_noun_without_a_sheet_says_where_to_name_it() -> None:
    with pytest.raises(TypeError, match=r"Stranger must be named in attnlab\.show\.sheets\.SHEETS"):
        line(type("Stranger", (Shown,), {})())


def test_a_result_tells_all_that_matters(nouns: dict[str, Shown]) -> None:
    page = Page(html(nouns["attnlab.lab.result.Result"]))
    for fact in (
        "mismatch: 512 of 17408, first (33, 0, 0)",
        "row 33 of output (sequence 1, query_len 1)",
        "sequence 1, token 0 of 1 (row 33), heads 0–3: 512 elements",
        "0, 33, 34, … becomes 0, 0, 33, 0, 34, 0, …",
        "backend model",
    ):
        assert fact in page.text
        assert " ".join(fact.split()) in " ".join(plain(nouns["attnlab.lab.result.Result"]).split())


def test_a_report_tells_what_no_contract_asks_for(nouns: dict[str, Shown]) -> None:
    page = html(nouns["attnlab.checker.library.Report"])
    assert ["unified_attention", "7 own2 own future"] in Page(page).rows
    assert 'font-weight:600">2 own future</span>' in page
    assert 'font-weight:600">7 own</span>' not in page


def test_an_error_map_tells_each_sequence(nouns: dict[str, Shown]) -> None:
    rows = Page(html(nouns["attnlab.lab.error_map.ErrorMap"])).rows
    assert ["0", "40", "33", "0", "0"] in [row[:5] for row in rows]
    assert ["1", "65", "1", "1", "512"] in [row[:5] for row in rows]


def test_a_call_tells_shapes_dtypes_strides_and_small_contents(nouns: dict[str, Shown]) -> None:
    rows = Page(html(nouns["attnlab.tensors.call.KernelCall"])).rows
    assert ["query_start_loc", "3", "int64", "1", "0, 33, 34"] in rows
    assert ["key_cache", "6 × 4 × 16 × 32 × 8", "float16"] in [row[:3] for row in rows]
    assert ["sm_scale", "None: left to the op"] in rows


def test_a_batch_of_the_real_size_stays_short() -> None:
    """5337 tokens of 64 heads, 3 GB were they written out, and 300 sequences: a page each."""
    shape = Case(query_lens=(1,) * 300, ctx_lens=(3,) * 300, num_heads=2, head_size=64)
    batch = Lab().batch(shape)
    page = batch._repr_html_()
    Page(page)
    assert len(page) < 100_000
    assert "288 more rows" in page
    assert "… and 88 more" in page
    assert page.count("<svg") == 12 + 200
    assert len(plain(batch).splitlines()) < 25


def test_a_table_of_breaches_escapes_what_it_holds() -> None:
    """A kernel's name, a text: nothing becomes markup, in HTML or in the terminal."""
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


def test_breaches_are_still_a_list(case: Case, lab: Lab) -> None:
    """Whoever took a list of violations goes on; none at all says so."""
    sound = case.replace(stage="sound")
    found = find_violations(lab.call(sound), Target.of(sound), decide(sound).kernels)
    assert found == []
    assert "none" in Page(html(found)).text
    result = lab.run(case)
    assert [one.effect for one in result.violations] == ["silent", "silent"]
    assert (
        type(dataclasses.asdict(diagnose(case, lab=lab, propose=False))["violations"]) is Violations
    )


def test_the_repr_of_a_case_makes_the_case_again() -> None:
    for one in (Case(), hostile(), Case(sm_scale=0.5, kv_head_range=(0, 2), backend="vllm")):
        assert eval(repr(one), {"Case": Case}) == one


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(2, 0), "nothing"),
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
def test_what_a_tensor_holds(tensor: torch.Tensor, told: str) -> None:
    assert contents(tensor) == told


def test_a_sheet_as_html() -> None:
    """Facts, a table with its fold, a bar, lines and a fold, all escaped, numbers to the right."""
    sheet = Sheet(
        kind="<K>",
        line="",
        head=Words("a<b", "bad"),
        parts=[
            Facts([("n<", ["1", Words("2>", "quiet")])]),
            Grid(["i", "bar"], [[i, Bar(i, 1, 9, f"{i}<")] for i in range(9)], "t<", most=3),
            Lines([Words("[b]x<y", code=True)]),
            Folded("more<", [Lines(["inside"])]),
        ],
    )
    page = render(sheet)
    seen = Page(page)
    told = StringIO()
    Console(file=told, width=80, color_system=None).print(as_text.render(sheet))
    assert all(text in told.getvalue() for text in ("a<b", "[b]x<y", "… and 6 more rows", "█"))
    assert "inside" not in told.getvalue()
    for text in ("<K>", "a<b", "n<", "2>", "t<", "[b]x<y", "more<", "inside", "6 more rows", "8<"):
        assert text in seen.texts
        assert "<K>" not in page
    assert page.count('<td class="n">') == 9
    assert page.count("<rect") == 8 + 9  # none for a context of 0


def test_ipython_shows_text_for_one_and_a_line_inside_a_list(nouns: dict[str, Shown]) -> None:
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    for noun in nouns.values():
        assert pretty(noun) == plain(noun)
        assert repr(noun) in pretty([noun])


def test_a_fresh_interpreter_shows_a_noun_by_its_name_alone() -> None:
    """No import of attnlab.show.sheets, none of attnlab.show.notebook: importing the noun is enough."""
    code = "from attnlab.case.case import Case; print(Case()._repr_html_()[:5], repr(Case(seed=3)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert done == "<div  Case(seed=3)\n"


def test_a_lab_prints_without_its_tensors(lab: Lab, case: Case) -> None:
    lab.run(case)
    assert "tensor(" not in repr(lab)
