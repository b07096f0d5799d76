"""Pages are self-contained and show the post-mortem, the cells and the provenance of a notebook."""

import dataclasses
import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.cases import refused
from nbformat import v4, write

from attnlab.case.errors import AttnLabError
from attnlab.reports.notebook_result import (
    OWNERS,
    POST_MORTEM_MIME,
    Event,
    Outcome,
    PostMortem,
    Results,
    write_junit,
    write_verdicts,
)
from attnlab.reports.pages import (
    drop_widgets,
    read_post_mortem,
    read_summary,
    read_title,
    read_verdicts,
    write_index,
    write_post_mortem,
)
from attnlab.show.notebook import PROVENANCE_MIME, VERDICTS_MIME, Verdict

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Loads(HTMLParser):
    """List what a browser would fetch or run for a page; a link that one can click is neither."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.in_style = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.in_style = tag == "style"
        if tag in ("script", "link", "iframe", "object", "embed", "base"):
            self.found.append(tag)
        for name, value in attrs:
            loads = name in ("src", "srcset", "poster", "data", "xlink:href") or (
                name == "href" and tag != "a"
            )
            if loads and not (value or "").startswith(("data:", "#")):
                self.found.append(f"{tag} {name}")
            if name.startswith("on") or "javascript:" in (value or ""):
                self.found.append(f"{tag} {name}")
            if name == "style":
                self.handle_css(value or "")

    def handle_data(self, data):
        if self.in_style:
            self.handle_css(data)

    def handle_css(self, css):
        css = css.lower()
        if "@import" in css or "url(" in css.replace("url(data:", "").replace("url(#", ""):
            self.found.append("css")


BAD = [
    ('<script src="https://example.org/a.js"></script>', "script"),
    ("<script>alert(1)</script>", "script"),
    ('<link rel="stylesheet" href="https://example.org/a.css">', "link"),
    ('<img src="https://example.org/a.png">', "img src"),
    ('<img src="//example.org/a.png">', "img src"),
    ('<img src="a.png" alt="">', "img src"),
    (f'<img src="data:image/png;base64,{PNG}" srcset="https://example.org/a.png 2x">', "img src"),
    ('<iframe src="https://example.org"></iframe>', "iframe"),
    ('<video poster="https://example.org/a.png"></video>', "video poster"),
    ('<svg><image xlink:href="https://example.org/a.png"></image></svg>', "image xlink:href"),
    ('<svg><use href="https://example.org/a.svg"></use></svg>', "use href"),
    ("<style>@import 'https://example.org/a.css'; p { color: red }</style>", "css"),
    ("<style>p { background: url( 'https://example.org/a.png' ) }</style>", "css"),
    ('<p style="background: URL(https://example.org/a.png)">x</p>', "css"),
    ('<p onclick="alert(1)">x</p>', "p onclick"),
    ('<a href="javascript:alert(1)">x</a>', "a href"),
]


def output(kind="display_data", **data):
    """Return an output whose MIME types are given with _ for / (text_html)."""
    return v4.new_output(kind, data={key.replace("_", "/", 1): one for key, one in data.items()})


def html(text):
    return output(text_html=text, text_plain="<fallback>")


def write_report(tmp_path, *cells, metadata=None, **facts):
    """Write a notebook of the given cells and its report; return the page."""
    notebook = v4.new_notebook(cells=list(cells), metadata=metadata or {})
    executed = tmp_path / "01-one.ipynb"
    write(notebook, executed)
    page = tmp_path / "01-one.html"
    write_post_mortem(executed, page, **({"command": "attnlab investigate 01"} | facts))
    return page.read_text()


def code(source="x = 1", *outputs):
    return v4.new_code_cell(source, outputs=list(outputs))


def outcome(folder=Path("/r"), **changes):
    facts = {
        "name": "01-one",
        "title": "One & only",
        "status": "passed",
        "message": "",
        "verdicts": [Verdict(name="rows", expected=3, found=3)],
        "seconds": 1.25,
        "executed": folder / "executed" / "01-one.ipynb",
        "html": folder / "01-one.html",
    }
    return Outcome(**(facts | changes))


@pytest.mark.parametrize(("bad", "found"), BAD)
def test_the_checker_sees_what_a_page_loads(bad, found):
    assert any(one.startswith(found) for one in Loads(f"<body>{bad}</body>").found)


def test_the_checker_lets_a_link_and_a_data_url_pass():
    good = f'<a href="https://example.org">x</a><img src="data:image/png;base64,{PNG}">'
    assert Loads(good).found == []


@pytest.mark.parametrize(("bad", "_"), BAD)
def test_a_report_loads_nothing_whatever_the_notebook_shows(tmp_path, bad, _):
    in_output = code("show()", html(f"<p>before</p>{bad}<p>after</p>"))
    page = write_report(tmp_path, v4.new_markdown_cell(f"# One\n\n{bad}\n"), in_output)
    assert Loads(page).found == []
    assert "before" in page
    assert "after" in page


def test_a_report_forbids_the_browser_to_load(tmp_path):
    assert "default-src 'none'; img-src data:" in write_report(tmp_path, code())


def test_a_report_has_title_folded_code_and_picture(tmp_path):
    page = write_report(
        tmp_path,
        v4.new_markdown_cell("# Why `x` <fails>\n\ntext"),
        code("# We expect 1\nx < 2", output(image_png=PNG, text_plain="<Figure>")),
    )
    assert "<title>Why x &lt;fails&gt;</title>" in page
    assert "<summary><span>code</span><code># We expect 1</code></summary>" in page
    assert 'class="highlight' in page
    assert f"data:image/png;base64,{PNG}" in page
    assert "&lt;Figure&gt;" not in page


def test_a_picture_beside_the_notebook_is_taken_in(tmp_path):
    import base64

    (tmp_path / "dot.png").write_bytes(base64.b64decode(PNG))
    page = write_report(tmp_path, v4.new_markdown_cell("# One\n\n![a dot](dot.png)"))
    assert "data:image/png;base64," in page
    assert "not embedded" not in page


def test_a_widget_gives_way_to_what_its_output_also_has(tmp_path):
    """Neither its model id nor the state that JupyterLab saved, nor the sign that it is loading, is there."""
    widget = {"model_id": "0123456789abcdef", "version_major": 2, "version_minor": 0}
    mime = "application/vnd.jupyter.widget-view+json"
    shown = {"text/html": "<p>table</p>", "text/plain": "VBox(...)", "image/png": PNG}
    both = v4.new_output("display_data", data={mime: widget, **shown})
    only = v4.new_output("display_data", data={mime: widget, "text/plain": "IntSlider(value=0)"})
    state = {"state": {widget["model_id"]: {"model_name": "VBoxModel"}}, "version_major": 2}
    kept = {"widgets": {"application/vnd.jupyter.widget-state+json": state}}
    page = write_report(tmp_path, code("both", both), metadata=kept)
    assert "<p>table</p>" in page
    assert "interactive" not in page
    for trace in (widget["model_id"], "widget", "Loading", "VBox"):
        assert trace not in page.split("</style>")[1]
    page = write_report(tmp_path, code("only", only), metadata=kept)
    assert "(interactive in JupyterLab)" in page
    assert "IntSlider" not in page


def test_an_executed_notebook_keeps_no_dead_widget():
    """What a static output stands beside goes, the saved state too; a lone view stays to be told of."""
    mime = "application/vnd.jupyter.widget-view+json"
    both = v4.new_output("display_data", data={mime: {"model_id": "1"}, "text/html": "<p>x</p>"})
    only = v4.new_output("display_data", data={mime: {"model_id": "1"}, "text/plain": "x"})
    notebook = v4.new_notebook(cells=[code("x", both, only)], metadata={"widgets": {"a": 1}})
    drop_widgets(notebook)
    assert "widgets" not in notebook.metadata
    outputs = notebook.cells[0].outputs
    assert [mime in output.data for output in outputs] == [False, True]
    assert outputs[0].data == {"text/html": "<p>x</p>"}


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("02-two.ipynb", 'href="02-two.html"'),
        ("./02-two.ipynb", 'href="02-two.html"'),
        ("02-two.ipynb#the-size-of-it", 'href="02-two.html#the-size-of-it"'),
        ("03-three.ipynb", "<a>there</a>"),
        ("../README.md", "<a>there</a>"),
        ("scratch.ipynb", "<a>there</a>"),
        ("file:///etc/hosts", "<a>there</a>"),
        ("#contract", 'href="#contract"'),
        ("https://github.com/x", 'href="https://github.com/x"'),
    ],
)
def test_a_link_leads_to_a_page_that_is_there(tmp_path, link, becomes):
    cell = v4.new_markdown_cell(f"# One\n\nsee [there]({link})")
    page = write_report(tmp_path, cell, pages={"01-one": "One", "02-two": "Two"})
    assert becomes in page
    assert ".ipynb" not in page.split("<footer>")[0].split("<main>")[1]


REPORT = PostMortem(
    failed="row <5>",
    where="gfx942",
    since="0.11.2",
    cause="a cast",
    fix="another cast",
    status="open",
    impact=("one row",),
    timeline=(Event(name="PR #1", text="merged & closed", url="https://example.org/1"),),
    follow_up={"kernel": "check the dtype"},
    incident="vLLM #28490",
)


def test_a_post_mortem_is_on_top_of_its_page_once(tmp_path):
    shown = v4.new_output("display_data", data=REPORT._repr_mimebundle_())
    cells = [v4.new_markdown_cell("# One\n\n## Symptom\n\ntext"), code("report", shown)]
    page = write_report(tmp_path, *cells).split("<main>")[1]
    for text in ("row &lt;5&gt;", "a cast", "one row", "check the dtype", "merged &amp; closed"):
        assert page.count(text) == 1, text
    order = [
        page.index(text)
        for text in ('class="summary"', 'id="timeline"', 'id="Symptom"', 'id="follow-up"')
    ]
    assert sorted(order) == order
    assert 'href="https://example.org/1"' in page
    assert '<a href="#Symptom">Symptom</a>' in page
    assert page.count("<h1") == 1


def test_a_page_shows_each_verdict_once(tmp_path):
    verdict = Verdict(name="the verdict", expected=1, found=1)
    card = v4.new_output("display_data", data=verdict._repr_mimebundle_())
    table = v4.new_output(
        "display_data",
        data={VERDICTS_MIME: [verdict.to_json()], "text/html": "<table>the verdict</table>"},
    )
    page = write_report(tmp_path, code("record", card), code("conclude", table))
    assert page.count("the verdict") == 1


def test_a_page_links_to_its_neighbours(tmp_path):
    pages = {"00-zero": "Zero", "01-one": "One", "02-two": "Two & more"}
    page = write_report(tmp_path, code(), pages=pages)
    assert '<a href="00-zero.html" rel="prev">← Zero</a>' in page
    assert '<a href="02-two.html" rel="next">Two &amp; more →</a>' in page
    only = write_report(tmp_path, code(), pages={"01-one": "One"}).split("<main>")[1]
    assert "rel=" not in only


def test_every_picture_has_an_alternative_text(tmp_path):
    named = output(image_png=PNG)
    named.metadata["image/png"] = {"alt": "error of <each> head"}
    heading = v4.new_markdown_cell("# One\n\n## The size")
    page = write_report(tmp_path, code("a", named), heading, code("b", output(image_png=PNG)))
    assert 'alt="error of &lt;each&gt; head"' in page
    assert 'alt="Figure: The size"' in page


def test_a_post_mortem_survives_json():
    assert PostMortem.from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT


@pytest.mark.parametrize(
    ("changes", "field"), [({"cause": " "}, "cause"), ({"follow_up": {"nobody": "x"}}, "follow_up")]
)
def test_a_post_mortem_checks_its_fields(changes, field):
    with refused(field):
        dataclasses.replace(REPORT, **changes)


def test_a_post_mortem_of_another_form_is_refused():
    bundle = REPORT._repr_mimebundle_()
    bundle[POST_MORTEM_MIME] = {"failed": "x"}
    shown = v4.new_output("display_data", data=bundle)
    with pytest.raises(AttnLabError):
        read_post_mortem(v4.new_notebook(cells=[code("x", shown)]))
    assert OWNERS == ("kernel", "test", "upstream")


def test_the_index_is_titled_by_the_incident(tmp_path):
    write_index(Results(outcomes=[outcome(tmp_path, report=REPORT)]), tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert "<title>vLLM #28490: post-mortem</title>" in page
    assert 'href="https://example.org/1"' in page
    assert Loads(page).found == []


def test_the_index_says_what_a_notebook_concludes_as_committed(tmp_path):
    cells = [v4.new_markdown_cell("# One\n\n**Verdict.** The `row` is\nnot written.\n\nMore.")]
    summary = read_summary(v4.new_notebook(cells=cells))
    assert summary == "The row is not written."
    told = outcome(tmp_path, summary=summary)
    for changes, shown in (({}, 1), ({"parameters": {"seed": 1}}, 0), ({"status": "failed"}, 0)):
        one = dataclasses.replace(told, **changes)
        write_index(Results(outcomes=[one]), tmp_path / "index.html")
        assert (tmp_path / "index.html").read_text().count(summary) == shown


def test_the_footer_has_the_case_as_a_command(tmp_path):
    shown = v4.new_output("display_data", data={PROVENANCE_MIME: {"case": {"num_heads": 8}}})
    footer = write_report(tmp_path, code("p()", shown)).split("<footer>")[1]
    assert "<code>attnlab run --num-heads 8</code>" in footer
    other = v4.new_output("display_data", data={PROVENANCE_MIME: {"case": {"colour": "red"}}})
    assert "attnlab run" not in write_report(tmp_path, code("p()", other))


def test_an_output_that_is_only_a_script_is_left_out(tmp_path):
    script = v4.new_output("display_data", data={"application/javascript": "alert(1)"})
    page = write_report(tmp_path, code("x", script, html("<p>kept</p>")))
    assert "alert" not in page
    assert "<p>kept</p>" in page


def test_a_traceback_is_there_without_escape_codes(tmp_path):
    error = v4.new_output(
        "error",
        ename="ValueError",
        evalue="\x1b[31mbad\x1b[0m <x>\nmore",
        traceback=["\x1b[31mValueError\x1b[0m: bad <x>"],
    )
    page = write_report(tmp_path, code("f()", error))
    assert '<p class="banner">ValueError: bad &lt;x&gt;</p>' in page
    assert '<span class="ansi-red-fg">ValueError</span>: bad &lt;x&gt;' in page
    assert "\x1b" not in page


def test_papermills_own_markers_are_not_in_a_report(tmp_path):
    marker = v4.new_markdown_cell("An Exception was encountered")
    marker.metadata["tags"] = ["papermill-error-cell-tag"]
    page = write_report(tmp_path, marker, v4.new_markdown_cell("kept"))
    assert "An Exception" not in page
    assert "kept" in page


def test_the_footer_has_the_provenance_and_the_body_has_not(tmp_path):
    facts = {
        "case": {"block_size": 16, "name": "<case>"},
        "versions": {"torch": "2.8"},
        "backends": ["rocm: <model>"],
    }
    shown = v4.new_output("display_data", data={PROVENANCE_MIME: facts, "text/plain": "seen not"})
    page = write_report(tmp_path, code("p()", shown), command="attnlab investigate 01 -p a='<b>'")
    footer = page.split("<footer>")[1]
    assert "rocm: &lt;model&gt;" in footer
    assert "torch 2.8" in footer
    assert '"block_size": 16' in footer.replace("&#34;", '"')
    assert "attnlab investigate 01 -p a=&#39;&lt;b&gt;&#39;" in footer
    assert "seen not" not in page
    assert "<case>" not in page


def test_a_failure_that_no_output_shows_is_in_the_banner(tmp_path):
    page = write_report(tmp_path, code(), failure="the kernel died in: <f>")
    assert '<p class="banner">the kernel died in: &lt;f&gt;</p>' in page
    assert "banner" not in write_report(tmp_path, code()).split("<main>")[1]


def test_the_title_is_the_first_h1():
    cells = [code("# no title"), v4.new_markdown_cell("## no\n\n# The **one** `x_y`\n\n# Two")]
    assert read_title(v4.new_notebook(cells=cells)) == "The one x_y"
    assert read_title(v4.new_notebook()) == ""


def test_verdicts_are_read_once_each():
    bundle = Verdict(name="rows", expected=3, found=4)._repr_mimebundle_()
    shown = v4.new_output("display_data", data=bundle)
    again = v4.new_output("execute_result", data=bundle, execution_count=1)
    (found,) = read_verdicts(v4.new_notebook(cells=[code("x", shown, again)]))
    assert (found.name, found.expected, found.found) == ("rows", 3, 4)


def test_the_index_has_each_notebook_and_loads_nothing(tmp_path):
    wrong = Verdict(name="<rows>", expected=[1], found="<i>")
    outcomes = [
        outcome(tmp_path),
        outcome(
            tmp_path,
            name="02-two",
            title="<Two>",
            status="failed",
            verdicts=[wrong],
            html=tmp_path / "02-two & more.html",
        ),
        outcome(tmp_path, name="03-x", status="died", message="<dead>", verdicts=[]),
    ]
    write_index(Results(outcomes=outcomes, not_run=["04-four"]), tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert Loads(page).found == []
    assert 'href="02-two%20%26%20more.html">&lt;Two&gt;</a>' in page
    assert "1 of 4 notebooks passed" in page
    assert "1 not run yet</b>: 04-four" in page
    assert '<span class="badge died">died</span>' in page
    for text in ("One &amp; only", "&lt;rows&gt;", "&lt;i&gt;", "&lt;dead&gt;", "no verdict"):
        assert text in page


@pytest.mark.parametrize(
    ("statuses", "not_run", "ok"),
    [
        (["passed", "passed"], [], True),
        (["passed"], ["02-two"], False),
        (["passed", "failed"], [], False),
        (["timeout"], [], False),
    ],
)
def test_verdicts_json_is_ok_once_all_have_passed(tmp_path, statuses, not_run, ok):
    outcomes = [outcome(tmp_path, status=status) for status in statuses]
    write_verdicts(Results(outcomes=outcomes, not_run=not_run), tmp_path / "verdicts.json")
    document = json.loads((tmp_path / "verdicts.json").read_text())
    assert document["ok"] is ok
    assert document["not_run"] == not_run
    assert set(document) == {"notebooks", "not_run", "unavailable", "versions", "ok"}
    assert document["notebooks"][0] == {
        "name": "01-one",
        "title": "One & only",
        "status": statuses[0],
        "message": "",
        "seconds": 1.25,
        "cells": [0, 0],
        "parameters": {},
        "html": "01-one.html",
        "verdicts": [{"name": "rows", "expected": 3, "found": 3, "evidence": {}, "ok": True}],
    }


def junit(tmp_path, *outcomes, not_run=()):
    """Return (notebook, case, problem, message) for each test case of what is written."""
    write_junit(Results(outcomes=outcomes, not_run=not_run), tmp_path / "junit.xml")
    root = ET.parse(tmp_path / "junit.xml").getroot()
    for suite in root:
        assert int(suite.get("tests")) == len(suite)
        assert int(suite.get("failures")) == len(suite.findall("*/failure"))
        assert int(suite.get("errors")) == len(suite.findall("*/error"))
    cases = root.findall("testsuite/testcase")
    problems = [(case[0].tag, case[0].get("message")) if len(case) else () for case in cases]
    return [
        (case.get("classname"), case.get("name"), *problem)
        for case, problem in zip(cases, problems, strict=True)
    ]


def test_junit_has_a_case_a_verdict(tmp_path):
    right, wrong = (Verdict(name=f"v{found}", expected=3, found=found) for found in (3, 4))
    failed = outcome(status="failed", message="1 verdict differs", verdicts=[right, wrong])
    assert junit(tmp_path, outcome(), failed) == [
        ("01-one", "rows"),
        ("01-one", "v3"),
        ("01-one", "v4", "failure", "v4: expected 3, found 4"),
    ]


@pytest.mark.parametrize(
    ("changes", "cases"),
    [
        ({"verdicts": []}, [("notebook",)]),
        (
            {"verdicts": [], "status": "failed", "message": "none"},
            [("notebook", "failure", "none")],
        ),
        (
            {"status": "failed", "message": "by hand"},
            [("rows",), ("notebook", "failure", "by hand")],
        ),
        ({"status": "error", "message": "E: x"}, [("rows",), ("notebook", "error", "E: x")]),
        ({"verdicts": [], "status": "died", "message": "m"}, [("notebook", "error", "m")]),
        ({"verdicts": [], "status": "timeout", "message": "m"}, [("notebook", "error", "m")]),
    ],
)
def test_junit_has_a_case_for_what_no_verdict_shows(tmp_path, changes, cases):
    assert junit(tmp_path, outcome(**changes)) == [("01-one", *case) for case in cases]


def test_junit_names_what_was_not_run(tmp_path):
    assert junit(tmp_path, outcome(), not_run=["02-two"]) == [
        ("01-one", "rows"),
        ("02-two", "notebook", "skipped", "not run"),
    ]


def test_junit_takes_what_xml_cannot_hold(tmp_path):
    bad = outcome(status="error", message="a\x1b[31m\x00<b>\ufffe", verdicts=[])
    assert junit(tmp_path, bad) == [("01-one", "notebook", "error", "a[31m<b>")]


@pytest.mark.parametrize("title", ["# One", "# One\n\n## Symptom"])
def test_the_first_picture_follows_the_summary(tmp_path, title):
    picture = code("plot()", output(image_png=PNG))
    page = write_report(
        tmp_path,
        v4.new_markdown_cell(title),
        picture,
        code("x", v4.new_output("display_data", data=REPORT._repr_mimebundle_())),
    )
    header, body = page.split('id="timeline"')
    assert header.count("<img") == 1
    assert "<img" not in body
    assert 'href="#picture"' in body
