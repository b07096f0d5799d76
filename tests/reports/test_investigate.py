"""Each notebook has its own outcome, independent of the others."""

import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET

import pytest
from bs4 import BeautifulSoup
from helpers.notebooks import OOM_KILL, SEGFAULT, VERDICTS, write_notebook
from helpers.processes import is_running, popen, wait_for

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.reports import investigate as module
from attnlab.reports.investigate import (
    SIGNALS,
    _last_words,
    can_fork,
    default_jobs,
    find_notebooks,
    investigate,
    start_fork_server,
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
        timeout_s=25,
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
        ("slow", "timeout", "longer than 25 s, in cell 2 of 3: import time"),
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
        [tmp_path / "01-one.ipynb"], parameters={}, reports=tmp_path / "r", timeout_s=60
    )
    assert (outcome.status, outcome.title) == ("error", "01-one")


@pytest.mark.parametrize(
    ("cores", "free_gib", "notebooks", "jobs"),
    [(2, 23.0, 7, 2), (2, 11.9, 7, 1), (64, 30.0, 7, 5), (64, math.inf, 7, 7), (1, 2.0, 7, 1)],
)
def test_number_of_jobs(monkeypatch, cores, free_gib, notebooks, jobs):
    monkeypatch.setattr(module, "cores", lambda: cores)
    monkeypatch.setattr(module, "available_bytes", lambda: free_gib * 2**30)
    assert default_jobs([f"0{number}-x.ipynb" for number in range(notebooks)]) == jobs


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


# Notebooks are found by name; bad input and unwritable reports are one line.


@pytest.fixture
def names(tmp_path):
    for name in ("03-cast.ipynb", "01-newest-token.ipynb", "10-scale.ipynb", "scratch.ipynb"):
        write_notebook(tmp_path / name, name, parameters="seed = 0\nplatform = 'gfx90a'")
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ([], ["01-newest-token", "03-cast", "10-scale"]),
        (["03"], ["03-cast"]),
        (["3", "newest-token"], ["03-cast", "01-newest-token"]),
        (["10-scale.ipynb", "10", "scale"], ["10-scale"]),
        (["notebooks/01-newest-token.ipynb", "03-cast"], ["01-newest-token", "03-cast"]),
    ],
)
def test_notebooks_are_found_by_number_slug_or_file(names, asked, found):
    assert [path.stem for path in find_notebooks(asked, names)] == found


@pytest.mark.parametrize("name", ["2", "new", "scratch", "", "03-cast.html"])
def test_an_unknown_notebook_is_an_error(names, name):
    with pytest.raises(AttnLabError) as error:
        find_notebooks(["03", name], names)
    assert str(error.value) == (
        f"notebook must be one of 01-newest-token, 03-cast, 10-scale; got {name!r}"
    )


def test_a_folder_without_notebooks_is_an_error(tmp_path):
    with pytest.raises(AttnLabError, match=r"must hold notebooks named NN-slug\.ipynb, got none"):
        find_notebooks([], tmp_path)


def test_an_unknown_parameter_is_an_error_before_the_run(names):
    with pytest.raises(AttnLabError) as error:
        investigate(
            find_notebooks([], names),
            parameters={"seed": 1, "plattform": "x"},
            reports=names / "r",
            timeout_s=60,
        )
    assert str(error.value) == (
        "parameter must be one that a notebook has (platform, seed), got 'plattform'"
    )
    assert not (names / "r").exists()


def test_reports_that_cannot_be_written_are_one_line(names):
    (names / "file").write_text("in the way")
    with pytest.raises(AttnLabError) as error:
        investigate(
            find_notebooks(["3"], names), parameters={}, reports=names / "file", timeout_s=60
        )
    assert str(error.value) == f"{names}/file/executed cannot be made or written: Not a directory"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can change the user")
def test_reports_without_write_permission_are_one_line(names):
    """Permissions do not restrict root, so the test runs as user nobody."""
    for folder in (names, *names.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    (names / "r" / "executed").mkdir(parents=True)
    for folder in (names / "r", names / "r" / "executed"):
        folder.chmod(0o755)  # independent of the umask
    os.seteuid(65534)
    try:
        with pytest.raises(AttnLabError, match="cannot be made or written: Permission denied"):
            investigate(
                find_notebooks(["3"], names), parameters={}, reports=names / "r", timeout_s=60
            )
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "name", ["index.html", "verdicts.json", "03-cast.html", "executed/03-cast.ipynb"]
)
def test_a_folder_in_the_way_of_a_report_is_one_line(names, name):
    (names / "r" / name).mkdir(parents=True)
    with pytest.raises(AttnLabError) as error:
        investigate(find_notebooks(["3"], names), parameters={}, reports=names / "r", timeout_s=60)
    assert str(error.value) == f"{names}/r/{name} must be a regular file or a new one"


def test_without_jupyter_the_error_says_what_to_install(names, monkeypatch):
    monkeypatch.setitem(sys.modules, "papermill", None)
    with pytest.raises(Unavailable, match=r"pip install 'attnlab\[lab\]'"):
        investigate([], parameters={}, reports=names / "r", timeout_s=60)


# Kernels that are forked end with the process that wanted them, and only a plain command is forked.


START = """
import os, sys, tempfile, time
from attnlab.reports.investigate import fork_kernel, start_fork_server
assert start_fork_server({})
with tempfile.TemporaryFile() as words:
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", sys.argv[1]]
    print(fork_kernel(command, os.environ, None, words).pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([sys.executable, "-m", "ipykernel_launcher", "-f", "file"], True),
        ([sys.executable, "-m", "ipykernel_launcher", "-f", "file", "--debug"], True),
        ([sys.executable, "-X", "dev", "-m", "ipykernel_launcher", "-f", "file"], False),
        (["another-python", "-m", "ipykernel_launcher", "-f", "file"], False),
        ([sys.executable, "-m", "another_kernel", "-f", "file"], False),
    ],
)
def test_which_commands_are_forked(command, expected):
    assert can_fork(command) is expected


def test_a_thread_starts_no_fork_server():
    found = []
    thread = threading.Thread(target=lambda: found.append(start_fork_server({})))
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")
def test_a_kernel_ends_with_a_process_that_is_killed(tmp_path):
    connection = tmp_path / "connection.json"
    words = [sys.executable, "-c", START, str(connection)]
    with popen(words, stdout=subprocess.PIPE, text=True) as starter:
        kernel = int(starter.stdout.readline())
        wait_for(connection.exists)  # ipykernel has started
        assert is_running(kernel)
        starter.kill()
        wait_for(lambda: not is_running(kernel))


# An interrupted run reports finished and unfinished notebooks, and leaves no process running.


INVESTIGATE = "import sys; from attnlab.cli.main import main; sys.exit(main())"
# A kernel with a child process, as in the notebook of the engine; it writes both process ids.
ASLEEP = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
with open("pids.part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.replace("pids.part", "pids")
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("SIGINT", 130, "attnlab: interrupted"),
        ("SIGTERM", 143, "attnlab: terminated by SIGTERM"),
    ],
)
def test_an_interrupted_run_keeps_its_results(tmp_path, name, code, line):
    write_notebook(tmp_path / "11-one.ipynb", "One", "1 + 1")
    write_notebook(tmp_path / "12-two.ipynb", "Two", "before = 1", ASLEEP, "after = 1")
    write_notebook(tmp_path / "13-three.ipynb", "Three", "1 + 1")
    reports, pids = tmp_path / "r", tmp_path / "pids"
    words = ("--jobs", "1", "--notebooks-folder", str(tmp_path), "--reports", str(reports))
    with popen(
        [sys.executable, "-c", INVESTIGATE, "investigate", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_for(pids.exists, limit_s=180)
            process.send_signal(getattr(signal, name))
            stdout, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, stdout) == (code, "")
    lines = stderr.splitlines()
    assert lines[0].startswith("attnlab: 1 of 3: 11-one passed in ")
    assert sorted(lines[1:]) == sorted([line, f"attnlab: results so far: {reports}/index.html"])
    kernel, child = pids.read_text().split()
    wait_for(lambda: not is_running(int(kernel)) and not is_running(int(child)), limit_s=30)
    check_reports(reports)


def check_reports(reports):
    """Assert that each of the three files lists all three notebooks."""
    document = json.loads((reports / "verdicts.json").read_text())
    place = f"interrupted in cell 3 of 4: {ASLEEP.strip().splitlines()[0]}"
    assert [(one["name"], one["status"], one["message"]) for one in document["notebooks"]] == [
        ("11-one", "passed", ""),
        ("12-two", "interrupted", place),
    ]
    assert (document["not_run"], document["ok"]) == (["13-three"], False)
    suites = {suite.get("name"): suite[0] for suite in ET.parse(reports / "junit.xml").getroot()}
    assert suites["12-two"].find("error").get("message") == place
    assert suites["13-three"].find("skipped").get("message") == "not run"
    assert "1 not run yet</b>: 13-three" in (reports / "index.html").read_text()
    assert (reports / "11-one.html").exists()
    assert not (reports / "13-three.html").exists()
    two = (reports / "12-two.html").read_text()
    assert '<p class="banner interrupted">' in two
    assert "<span>not run</span><code>after = 1</code>" in two


# jsonschema is imported without its slow parser, and notebooks are still validated.


CODE = """
import sys
{before}
from attnlab.reports.investigate import import_jsonschema
import_jsonschema()
print("jsonschema" in sys.modules, sys.modules.get("rfc3987_syntax", "absent") == "absent")
import nbformat
try:
    cells = [{{"cell_type": "wrong"}}]
    nbformat.validate({{"nbformat": 4, "nbformat_minor": 5, "metadata": {{}}, "cells": cells}})
except nbformat.ValidationError:
    print("refused")
"""


def printed(before: str) -> list[str]:
    """Return the lines that a new process prints."""
    command = [sys.executable, "-c", CODE.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_parser_is_left_out_and_a_wrong_notebook_is_refused() -> None:
    assert printed("") == ["True True", "refused"]


def test_a_parser_that_is_there_stays() -> None:
    before = "import types; sys.modules['rfc3987_syntax'] = types.ModuleType('rfc3987_syntax')"
    assert printed(before) == ["False False", "refused"]
