"""The project's own files are consistent."""

import ast
import json
import re
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from attnlab.case.declaration import FIELDS

ROOT = Path(__file__).parent.parent
MAX_README_LINES = 120
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scripts of tools/ importable."""
    monkeypatch.syspath_prepend(ROOT / "tools")


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_is_what_pyproject_says() -> None:
    """The committed file is what the tool generates, and it lists every requirement."""
    import environment

    text = (ROOT / "environment.yml").read_text()
    assert text == environment.environment(), "run: python tools/environment.py"
    listed = next(d["pip"] for d in yaml.safe_load(text)["dependencies"] if isinstance(d, dict))
    project = _project()
    extras = project["optional-dependencies"]
    assert project["dependencies"]
    assert all(extras.values())
    assert {*project["dependencies"]}.union(*extras.values()) <= set(listed)


def test_every_dependency_says_why_it_is_there() -> None:
    """Each requirement in pyproject.toml has a comment on its line, or above its extra."""
    project = _project()
    count = sum(map(len, [project["dependencies"], *project["optional-dependencies"].values()]))
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    listed = [line for line in lines if re.match(r'  "[][A-Za-z0-9_-]+[=><~]', line)]
    assert len(listed) == count
    assert [line for line in listed if "#" not in line and "torch==" not in line] == []


def test_make_installs_extras_that_exist() -> None:
    """The Makefile names extras of pyproject.toml and no package of its own."""
    text = (ROOT / "Makefile").read_text()
    extras = re.search(r"^EXTRAS \?= (.+)$", text, re.MULTILINE)
    assert set(extras[1].split(",")) <= set(_project()["optional-dependencies"])
    assert re.findall(r"pip install (.*)", text) == [
        "--quiet --disable-pip-version-check --no-compile"
    ]
    assert re.findall(r"\$\(INSTALL\) (.*?\))", text) == ['-e ".[$(EXTRAS)', '-e ".[$(FEWER)']


STUB = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *{fails}*) exit 1;; esac
"""


@pytest.mark.parametrize(
    ("extras", "fails", "code", "installed"),
    [
        ("cpu,vllm,lab", "nothing", 0, ["[cpu,vllm,lab]"]),
        ("cpu,vllm,lab", ",vllm", 0, ["[cpu,vllm,lab]", "[cpu,lab]"]),
        ("cpu,vllm,lab", "install", 2, ["[cpu,vllm,lab]", "[cpu,lab]"]),
        ("cpu,lab", "install", 2, ["[cpu,lab]"]),
    ],
)
def test_set_up_goes_on_without_vllm_and_says_so(tmp_path, extras, fails, code, installed) -> None:
    """Without vLLM's CPU build the rest is installed; any other failure fails the set-up."""
    log, python = tmp_path / "log", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB.format(log=log, fails=fails))
    python.chmod(0o755)
    command = ["make", "setup", f"VENV={python.parent.parent}", f"EXTRAS={extras}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert [re.search(r"\[.*\]", line)[0] for line in log.read_text().splitlines()] == installed
    notices = [line for line in done.stdout.splitlines() if line.startswith("attnlab: ")]
    assert len(notices) == len(installed) - 1
    assert any(tmp_path.glob("venv/.ready-*")) is (code == 0)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_clean(path: Path) -> None:
    """No outputs, no execution counts, one parameters cell, short code cells, a conclusion."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in code) == 1
    sources = ["".join(cell["source"]) for cell in code]
    assert [source for source in sources if not is_short(source)] == []
    assert sources[-1].startswith("study.conclude(verdicts, ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_nothing_that_another_machine_would_change(path: Path) -> None:
    """Its text is what nbformat writes of its sources and tags, so that diffs show only edits."""
    import strip

    text = path.read_text(encoding="utf-8")
    assert text == strip.stripped(text), "run: python tools/strip.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_can_run_again_in_its_kernel(path: Path) -> None:
    """Only its parameters have names of a Case's fields, because case_from reads them from the globals."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    others = [cell for cell in code if "parameters" not in cell["metadata"].get("tags", [])]
    assigned = [
        node.id
        for cell in others
        for node in ast.walk(ast.parse("".join(cell["source"])))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    assert sorted({*assigned} & {*FIELDS}) == []


def test_what_a_run_leaves_in_a_notebook_is_stripped() -> None:
    """Outputs, counts, widget state, versions and a cell's transient metadata go; tags and ids stay."""
    import strip
    from nbformat import v4, writes

    written = v4.new_code_cell("x = 1", metadata={"tags": ["parameters"]}, id="one")
    clean = strip.stripped(writes(v4.new_notebook(cells=[written])))
    run = v4.new_code_cell("x = 1", id="one", execution_count=3, outputs=[v4.new_output("stream")])
    run.metadata = {"tags": ["parameters"], "collapsed": True, "ExecuteTime": {"start": "now"}}
    metadata = {"language_info": {"name": "python", "version": "3.99"}, "widgets": {"x": {}}}
    left = writes(v4.new_notebook(cells=[run], metadata=metadata))
    assert left != clean
    assert strip.stripped(left) == clean


def is_short(source: str) -> bool:
    """Answer whether a code cell has at most 15 lines and one function."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    count = sum(isinstance(node, functions) for node in ast.walk(ast.parse(source)))
    return source.count("\n") < 15 and count <= 1


@pytest.mark.parametrize(
    ("source", "short"),
    [
        ("\n".join(["x = 1"] * 15), True),
        ("\n".join(["x = 1"] * 16), False),
        ("def f():\n    pass", True),
        ("def f():\n    pass\ndef g():\n    pass", False),
        ("class A:\n    def f(self):\n        pass", False),
    ],
)
def test_a_long_cell_is_found(source: str, short: bool) -> None:
    assert is_short(source) is short


def test_the_readme_names_every_notebook_by_a_link_that_is_there() -> None:
    """The table has one row per notebook."""
    linked = re.findall(r"\]\(notebooks/([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(linked) > 8
    assert sorted(linked) == [path.name for path in NOTEBOOKS]


def test_links_between_notebooks_lead_somewhere() -> None:
    """Links between notebooks are used in JupyterLab and in the reports."""
    links = [
        (path.name, target)
        for path in NOTEBOOKS
        for target in re.findall(r"\]\(([^):]+\.ipynb)\)", path.read_text())
    ]
    assert len(links) >= 7
    assert [link for link in links if not (ROOT / "notebooks" / link[1]).exists()] == []


def test_imports_of_a_light_command_stay_light() -> None:
    """`explain` does not import torch."""
    code = (
        "import sys; from attnlab.cli.main import main; main(['explain', '--json']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_hand_written_fault_replaces_a_bare_call_once() -> None:
    """A bare call is a statement and an expression with the same text."""
    from hand_faults import HandFault

    text = "def kernel(x, y):\n    tl.store(x, y)\n    z = tl.store(x, y)\n"
    fault = HandFault(
        name="", op="", functions=("kernel",), changes=(("tl.store(x, y)", "tl.store(y, x)"),)
    )
    rows = ["def kernel(x, y):", "    tl.store(y, x)", "    z = (tl.store(y, x))", ""]
    assert fault.apply(text) == "\n".join(rows)


def test_a_hand_written_fault_in_several_lines_keeps_the_indentation() -> None:
    """Triton dedents the text of a kernel, which may be inside an if."""
    from hand_faults import HandFault

    text = "if True:\n    def kernel(x, y):\n        z = (\n            x\n            + y\n        )\n"
    fault = HandFault(name="", op="", functions=("kernel",), changes=(("x + y", "x"),))
    changed = fault.apply(text)
    kernel = textwrap.dedent(changed.partition("\n")[2])
    assert ast.unparse(ast.parse(kernel).body[0].body[0]) == "z = x"
    assert changed.count("\n") == text.count("\n")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.slow
def test_the_wheel_and_the_sdist_are_complete(tmp_path: Path) -> None:
    """The wheel contains every file of the package that git tracks; the sdist the notebooks, too."""
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    tracked = subprocess.run(
        ["git", "ls-files", "attnlab", "notebooks", "docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    package = {path for path in tracked if path.startswith("attnlab/")}
    assert {"attnlab/__init__.py", "attnlab/py.typed"} <= package
    with zipfile.ZipFile(wheel) as archive:
        assert package - {*archive.namelist()} == set()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*tracked} - names == set()
