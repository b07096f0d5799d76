"""Each notebook has its own outcome, independent of the others."""

import gc
import json
import math
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from helpers.notebooks import OOM_KILL, SEGFAULT, VERDICTS, write_notebook

from attnlab.reports import investigate as module
from attnlab.reports.investigate import (
    SIGNALS,
    _last_words,
    default_jobs,
    find_notebooks,
    free_memory_gib,
    investigate,
)
from attnlab.reports.notebook_result import Results, all_ok, write_verdicts
from attnlab.reports.pages import write_index
from attnlab.show.sheets import plain


def write_all(root):
    """Write a notebook for each outcome."""
    write_notebook(
        root / "01-pass.ipynb",
        "It passes",
        f"{VERDICTS}import multiprocessing, os\n"
        "parent = multiprocessing.parent_process()\n"
        "facts = {'folder': os.getcwd(), 'parent': parent and parent.pid}\n"
        "facts['threads'] = os.environ['OMP_NUM_THREADS']\n"
        "verdicts.record('seed', expected=7, found=seed, **facts)",
        "verdicts.conclude()",
        parameters="seed = 0",
    )
    write_notebook(
        root / "02-differs.ipynb",
        "A verdict differs",
        f"{VERDICTS}verdicts.record('right', expected=1, found=1)",
        "verdicts.record('wrong', expected=1, found=2)",
        "verdicts.conclude()",
        "print('not reached')",
    )
    write_notebook(
        root / "03-raises.ipynb",
        "It raises",
        f"{VERDICTS}verdicts.record('kept', expected=1, found=1)",
        "raise ValueError('first line\\nsecond line')",
    )
    write_notebook(
        root / "04-slow.ipynb", "Too slow", "import time\ntime.sleep(60)", "print('not reached')"
    )
    write_notebook(
        root / "05-dies.ipynb", "It dies", "import os", "os._exit(3)", "print('not reached')"
    )
    write_notebook(
        root / "06-silent.ipynb",
        "It never concludes",
        f"{VERDICTS}verdicts.record('wrong', expected=1, found=2)\nNone",
    )
    (root / "07-broken.ipynb").write_text("{ this is no notebook")
    needs = "from attnlab.case.errors import Unavailable\nraise Unavailable('needs a package\\nof its own')"
    write_notebook(
        root / "08-lacks.ipynb",
        "It lacks something",
        f"{VERDICTS}verdicts.record('kept', expected=1, found=1)",
        needs,
    )
    write_notebook(
        root / "09-wrong.ipynb",
        "It is wrong before it lacks something",
        f"{VERDICTS}verdicts.record('wrong', expected=1, found=2)",
        needs,
    )
    write_notebook(root / "10-segfault.ipynb", "It reads what is not there", SEGFAULT)
    write_notebook(root / "11-killed.ipynb", "It is killed, as without memory", OOM_KILL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run all notebooks once; return outcomes by slug, the folder of reports and the progress."""
    root = tmp_path_factory.mktemp("notebooks")
    reports = tmp_path_factory.mktemp("out") / "new" / "reports"
    write_all(root)
    progress = []
    outcomes = investigate(
        find_notebooks([], root),
        parameters={"seed": 7},
        reports=reports,
        timeout_s=15,
        on_progress=lambda *step: progress.append(step),
        jobs=2,
    )
    assert [one.name for one in outcomes] == [path.stem for path in find_notebooks([], root)]
    return {one.name[3:]: one for one in outcomes}, reports, progress


@pytest.mark.parametrize(
    ("slug", "status", "message"),
    [
        ("pass", "passed", ""),
        ("differs", "failed", "1 verdict differs: wrong: expected 1, found 2"),
        ("raises", "error", "ValueError: first line"),
        ("slow", "timeout", "longer than 15 s, in cell 2 of 3: import time"),
        ("dies", "died", "the kernel died (exit code 3) in cell 3 of 4: os._exit(3)"),
        (
            "segfault",
            "died",
            f"the kernel died (SIGSEGV: {SIGNALS['SIGSEGV']}) in cell 2 of 2: {SEGFAULT}",
        ),
        (
            "killed",
            "died",
            f"the kernel died (SIGKILL: {SIGNALS['SIGKILL']}) in cell 2 of 2: {OOM_KILL}",
        ),
        ("silent", "failed", "wrong: expected 1, found 2"),
        ("lacks", "unavailable", "needs a package"),
        ("wrong", "failed", "wrong: expected 1, found 2"),
    ],
)
def test_the_outcome_of_each_notebook(run, slug, status, message):
    outcome = run[0][slug]
    assert (outcome.status, outcome.message) == (status, message)


def test_an_invalid_notebook_is_an_error(run):
    outcome = run[0]["broken"]
    assert (outcome.status, outcome.title) == ("error", "07-broken")
    assert outcome.message.startswith("NotJSONError: ")
    assert "NotJSONError" in outcome.html.read_text()


def test_verdicts_before_a_failure_are_kept(run):
    names = {slug: [verdict.name for verdict in one.verdicts] for slug, one in run[0].items()}
    assert names == {
        "pass": ["seed"],
        "differs": ["right", "wrong"],
        "raises": ["kept"],
        "slow": [],
        "dies": [],
        "silent": ["wrong"],
        "broken": [],
        "lacks": ["kept"],
        "wrong": ["wrong"],
        "segfault": [],
        "killed": [],
    }


def test_a_notebook_runs_in_its_folder_with_its_parameters(run):
    outcomes, reports, _ = run
    (verdict,) = outcomes["pass"].verdicts
    assert verdict.found == 7
    assert verdict.evidence["folder"] != str(reports)
    assert os.path.exists(os.path.join(verdict.evidence["folder"], "01-pass.ipynb"))
    assert verdict.evidence["parent"] == (os.getpid() if sys.platform == "linux" else None)
    assert int(verdict.evidence["threads"]) >= 1


def test_a_verdict_that_ends_a_cell_is_shown_once(run):
    executed = json.loads(run[0]["pass"].executed.read_text())
    shown = [len(cell["outputs"]) for cell in executed["cells"] if "record(" in cell["source"][-1]]
    assert shown == [1]


def test_each_notebook_has_its_files(run):
    outcomes, reports, _ = run
    for outcome in outcomes.values():
        assert outcome.executed == reports / "executed" / f"{outcome.name}.ipynb"
        assert outcome.executed.exists()
        assert outcome.message.split(": ")[0] in outcome.html.read_text()
    folder = outcomes["pass"].verdicts[0].evidence["folder"]
    again = f"<code>attnlab investigate 01 --notebooks-folder {folder}"
    assert f"{again} -p seed=7</code>" in outcomes["pass"].html.read_text()
    assert "-p seed" not in outcomes["differs"].html.read_text()


@pytest.mark.parametrize(
    ("slug", "stopped", "not_run"),
    [
        ("pass", "", 0),
        ("differs", "verdicts.conclude()", 1),
        ("raises", "raise ValueError", 0),
        ("slow", "import time", 1),
        ("dies", "os._exit(3)", 1),
        ("segfault", SEGFAULT, 0),
        ("killed", OOM_KILL, 0),
        ("silent", "", 0),
        ("lacks", "from attnlab.case.errors", 0),
    ],
)
def test_a_page_shows_where_its_notebook_stopped(run, slug, stopped, not_run):
    page = BeautifulSoup(run[0][slug].html.read_text(), "html.parser")
    (*places,) = page.select("#stopped pre")
    assert len(places) == bool(stopped)
    assert not stopped or places[0].get_text().startswith(stopped)
    assert bool(page.select('.banner a[href="#stopped"]')) is bool(stopped)
    labels = [label.get_text() for label in page.select("details.code > summary > span")]
    assert labels.count("not run") == not_run
    assert labels.count("stopped here") == len(places)


def test_the_results_are_written(run):
    outcomes, reports, _ = run
    document = json.loads((reports / "verdicts.json").read_text())
    assert document["ok"] is False
    assert [one["status"] for one in document["notebooks"]] == [
        one.status for one in outcomes.values()
    ]
    suites = ET.parse(reports / "junit.xml").getroot()
    assert [len(suite) for suite in suites] == [1, 2, 2, 1, 1, 1, 1, 2, 1, 1, 1]
    lacks = suites[7]
    assert (lacks.get("failures"), lacks.get("errors"), lacks.get("skipped")) == ("0", "0", "1")
    assert lacks.find("testcase/skipped").get("message") == "needs a package"
    assert document["unavailable"] == ["08-lacks"]
    index = (reports / "index.html").read_text()
    for outcome in outcomes.values():
        assert f'href="{outcome.name}.html"' in index
    assert not list(reports.rglob("*.part"))


def test_progress_counts_cells_up_to_the_total(run):
    steps = [(cell, total) for name, cell, total in run[2] if name == "01-pass"]
    assert steps == sorted(steps)
    assert steps[0][0] < steps[-1][0] == steps[-1][1]


def test_a_run_without_failures_prints_nothing(tmp_path, capfd):
    path = write_notebook(tmp_path / "01-one.ipynb", "One", "1 + 1")
    (outcome,) = investigate([path], parameters={}, reports=tmp_path / "r", timeout_s=60)
    assert (outcome.status, outcome.title) == ("passed", "One")
    assert json.loads((tmp_path / "r" / "verdicts.json").read_text())["ok"] is True
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("slugs", "ok"),
    [(["pass", "lacks"], True), (["lacks"], False), (["pass", "lacks", "wrong"], False)],
)
def test_an_unavailable_notebook_does_not_fail_a_run(run, tmp_path, slugs, ok):
    """It fails a run only if no other notebook passed."""
    outcomes = [run[0][slug] for slug in slugs]
    assert all_ok(outcomes) is ok
    results = Results(outcomes=outcomes)
    write_verdicts(results, run[1] / "some.json")
    assert json.loads((run[1] / "some.json").read_text())["ok"] is ok
    shown = plain(results)
    assert "needs a package" in shown
    assert "1 cannot run here" in shown
    write_index(results, run[1] / "some.html")
    assert "1 unavailable on this machine" in (run[1] / "some.html").read_text()
    for name in ("some.json", "some.html"):
        (run[1] / name).unlink()


def test_a_timeout_prints_nothing(tmp_path, capfd, caplog):
    path = write_notebook(tmp_path / "01-one.ipynb", "One", "while True: pass")
    (outcome,) = investigate([path], parameters={}, reports=tmp_path / "r", timeout_s=0.5)
    gc.collect()
    assert outcome.status == "timeout"
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_files_of_an_earlier_run_are_ignored(tmp_path):
    executed = tmp_path / "r" / "executed"
    executed.mkdir(parents=True)
    write_notebook(executed / "01-one.ipynb", "Old")
    (tmp_path / "01-one.ipynb").write_text("{")
    (outcome,) = investigate(
        [tmp_path / "01-one.ipynb"], parameters={}, reports=tmp_path / "r", timeout_s=9
    )
    assert (outcome.status, outcome.title) == ("error", "01-one")


@pytest.mark.parametrize(
    ("cores", "free_gib", "notebooks", "jobs"),
    [(2, 23.0, 7, 2), (2, 11.9, 7, 1), (64, 30.0, 7, 5), (64, math.inf, 7, 7), (1, 2.0, 7, 1)],
)
def test_number_of_jobs(monkeypatch, cores, free_gib, notebooks, jobs):
    monkeypatch.setattr(module, "cores", lambda: cores)
    monkeypatch.setattr(module, "free_memory_gib", lambda: free_gib)
    assert default_jobs([f"0{number}-x.ipynb" for number in range(notebooks)]) == jobs


def test_free_memory_is_at_most_the_total():
    total = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    assert 0 < free_memory_gib() <= total


@pytest.mark.parametrize(("given", "threads"), [(None, "3"), ("7", "7")])
def test_the_processes_share_the_cores(tmp_path, monkeypatch, given, threads):
    """With six cores each of two notebooks gets three threads, unless the user sets a number."""
    monkeypatch.setattr(module, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    record = "import os\nverdicts.record('it', expected=0, found=os.environ['OMP_NUM_THREADS'])"
    paths = [write_notebook(tmp_path / f"0{n}-x.ipynb", "X", VERDICTS + record) for n in (1, 2)]
    results = investigate(paths, parameters={}, reports=tmp_path / "r", timeout_s=60, jobs=2)
    assert [one.verdicts[0].found for one in results] == [threads, threads]


def test_the_last_line_of_a_kernel_without_warnings(tmp_path):
    words = tmp_path / "words"
    words.write_bytes(b"[IPKernelApp] WARNING | x\nFatal \xff error\n\n")
    with words.open("rb") as file:
        assert _last_words(file) == " (Fatal \ufffd error)"
    words.write_bytes(b"[IPKernelApp] WARNING | x\n")
    with words.open("rb") as file:
        assert _last_words(file) == ""
