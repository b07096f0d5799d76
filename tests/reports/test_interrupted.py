"""An interrupted run reports finished and unfinished notebooks, and leaves no process running."""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from helpers.notebooks import write_notebook
from helpers.processes import is_running, popen, wait_for

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("SIGINT", 130, "attnlab: interrupted"),
        pytest.param(*("SIGTERM", 143, "attnlab: terminated by SIGTERM"), marks=pytest.mark.slow),
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
    index = (reports / "index.html").read_text()
    assert "1 not run yet</b>: 13-three" in index
    assert (reports / "11-one.html").exists()
    assert not (reports / "13-three.html").exists()
    two = (reports / "12-two.html").read_text()
    assert '<p class="banner interrupted">' in two
    assert "<span>not run</span><code>after = 1</code>" in two
