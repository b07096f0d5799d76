"""A run is compared with an earlier one: verdicts are gone, broken, changed, fixed or new."""

import json

import pytest
from helpers.notebooks import VERDICTS, write_notebook

from attnlab.case.errors import InvalidCase
from attnlab.cli.main import main
from attnlab.reports.notebook_result import Kept, Results, compare, read_baseline
from attnlab.show.notebook import Verdict
from attnlab.show.sheets import plain


def kept(*verdicts, **parameters):
    return Kept(verdicts=verdicts, parameters=parameters)


def verdict(found, expected=3, name="rows", **evidence):
    return Verdict(name=name, expected=expected, found=found, evidence=evidence)


@pytest.mark.parametrize(
    ("before", "now", "kind", "is_loss", "values"),
    [
        (kept(verdict(3)), kept(verdict(4)), "broken", True, (3, 4)),
        (kept(verdict(4)), kept(verdict(3)), "fixed", False, (4, 3)),
        (kept(verdict(4)), kept(verdict(5)), "changed", True, (4, 5)),
        (kept(verdict(3)), kept(verdict(5, expected=5)), "changed", True, (3, 5)),
        (kept(verdict(3)), kept(), "gone", True, (3, None)),
        (kept(), kept(verdict(3)), "new", False, (None, 3)),
        (None, kept(verdict(3)), "new", False, (None, 3)),
        (
            kept(verdict(3, size=1.0, same=2)),
            kept(verdict(3, size=1.5, same=2)),
            "figures",
            False,
            ({"size": 1.0}, {"size": 1.5}),
        ),
        (kept(seed=1, x=2), kept(seed=4, x=2), "parameters", False, ({"seed": 1}, {"seed": 4})),
    ],
)
def test_each_kind_of_change(before, now, kind, is_loss, values):
    (change,) = compare("01-one", now, before)
    assert (change.kind, change.is_loss) == (kind, is_loss)
    assert (change.before, change.after) == values


def test_equal_verdicts_are_no_change_and_losses_come_first():
    same = kept(verdict(3, size=1.0), seed=1)
    assert compare("01-one", same, same) == []
    before = kept(verdict(3), verdict(1, name="b"))
    now = kept(verdict(3, name="a"), verdict(3))
    assert [change.kind for change in compare("01-one", now, before)] == ["gone", "new"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[" * 100_000,
        "[]",
        "{}",
        '{"notebooks": [{"name": "01-one"}]}',
        '{"notebooks": [{"name": "01-one", "verdicts": [{"name": "x"}]}]}',
        '{"notebooks": [{"name": "01-one", "verdicts": 3}]}',
        '{"notebooks": [{"name": ["x"], "verdicts": []}]}',
    ],
)
def test_a_wrong_baseline_is_one_line(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(InvalidCase) as error:
        read_baseline(tmp_path / "b.json")
    assert str(error.value).startswith(
        "baseline must be a verdicts.json of attnlab investigate, got"
    )
    assert "\n" not in str(error.value)


def test_a_missing_baseline_is_one_line_and_keeps_the_reports(tmp_path, capsys):
    write_notebook(tmp_path / "01-one.ipynb", "One", "1 + 1")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "verdicts.json").write_text("of before")
    words = ["--notebooks-folder", str(tmp_path), "--reports", str(tmp_path / "r")]
    assert main(["investigate", *words, "--baseline", str(tmp_path / "none.json")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("attnlab: baseline must be ")
    assert printed.err.endswith("none.json: No such file or directory\n")
    assert (tmp_path / "r" / "verdicts.json").read_text() == "of before"


def write_one(folder, found, expected=1):
    record = f"verdicts.record('rows', expected={expected}, found={found})\nverdicts.conclude()"
    return write_notebook(folder / "01-one.ipynb", "One", f"{VERDICTS}{record}")


def investigate_json(folder, capsys, *words):
    """Run the command in a folder; return its exit code and its document."""
    folders = ("--notebooks-folder", str(folder), "--reports", str(folder / "r"))
    code = main(["investigate", *folders, "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_is_compared_with_an_earlier_one(tmp_path, capsys):
    """The verdicts.json of the same folder can be the baseline: it is read before it is rewritten."""
    write_one(tmp_path, 1)
    write_notebook(
        tmp_path / "02-two.ipynb", "Two", f"{VERDICTS}verdicts.record('two', expected=1, found=1)"
    )
    code, document = investigate_json(tmp_path, capsys)
    assert (code, "baseline" in document) == (0, False)
    last = ("--baseline", str(tmp_path / "r" / "verdicts.json"))
    code, document = investigate_json(tmp_path, capsys, *last)
    assert (code, document["baseline"]["changes"]) == (0, [])
    assert 'class="changes"' not in (tmp_path / "r" / "index.html").read_text()

    (tmp_path / "kept.json").write_bytes((tmp_path / "r" / "verdicts.json").read_bytes())
    write_one(tmp_path, 2, expected=2)  # as expected, with another value
    code, document = investigate_json(
        tmp_path, capsys, "2", "--baseline", str(tmp_path / "kept.json")
    )
    assert (code, document["baseline"]["changes"]) == (
        0,
        [],
    )  # a notebook that was not requested is not missing
    last = ("--baseline", str(tmp_path / "kept.json"))
    (tmp_path / "02-two.ipynb").unlink()
    code, document = investigate_json(tmp_path, capsys, *last)
    assert (code, document["ok"]) == (1, False)
    found = [(c["notebook"], c["kind"], c["before"]) for c in document["baseline"]["changes"]]
    assert found == [("01-one", "changed", 1), ("02-two", "gone", 1)]
    index = (tmp_path / "r" / "index.html").read_text()
    assert index.count('class="changes"') == 1
    assert "<td>changed</td><td><code>1</code></td><td><code>2</code></td>" in index


def test_changes_are_printed_as_a_table():
    changes = compare("01-one", kept(verdict(4)), kept(verdict(3)))
    printed = plain(Results(outcomes=(), baseline="kept.json", changes=changes))
    assert "since kept.json" in printed
    assert "broken" in printed
