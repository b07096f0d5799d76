"""The project's own files hold together."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_is_what_pyproject_says() -> None:
    """The generated text is the committed one, and pip's part names every requirement."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import environment
    finally:
        sys.path.pop(0)
    text = (ROOT / "environment.yml").read_text()
    assert text == environment.environment(), "run: python tools/environment.py"
    listed = next(d["pip"] for d in yaml.safe_load(text)["dependencies"] if isinstance(d, dict))
    project = _project()
    wanted = {*project["dependencies"]}.union(*project["optional-dependencies"].values())
    assert wanted <= set(listed)


def test_every_dependency_says_why_it_is_there() -> None:
    """Each requirement in pyproject.toml has a comment on its line, or its extra has one above."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    bare = [
        line
        for line in lines
        if re.match(r'  "[A-Za-z0-9_-]+[=><~]', line)
        and "#" not in line
        and "torch==" not in line  # the comment above its extra says why
    ]
    assert bare == []


def test_make_installs_extras_that_exist() -> None:
    """The Makefile names extras of pyproject.toml and no package of its own."""
    text = (ROOT / "Makefile").read_text()
    extras = re.search(r"^EXTRAS \?= (.+)$", text, re.MULTILINE)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(_project()["optional-dependencies"])
    assert re.findall(r"pip install (.*)", text) == [
        '--quiet --disable-pip-version-check -e ".[$(EXTRAS)]"'
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_clean(path: Path) -> None:
    """No outputs, no execution counts, one parameters cell, short code cells, at most one function."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in code) == 1
    sources = ["".join(cell["source"]) for cell in code]
    assert max(source.count("\n") + 1 for source in sources) <= 20
    assert "verdicts.conclude()" in sources[-1]


def test_imports_of_a_light_command_stay_light() -> None:
    """--help and explain need no torch: they answer at once."""
    code = (
        "import sys; from attnlab.cli import main; main(['explain', '--json']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
