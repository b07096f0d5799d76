"""Parameters of notebooks: an unknown name or a wrong value is one line."""

import json
from pathlib import Path

import pytest
from helpers.notebooks import VERDICTS, write_notebook
from papermill.exceptions import PapermillExecutionError
from papermill.execute import execute_notebook

from attnlab.case.errors import InvalidCase
from attnlab.case.flags import check_injected, read_parameters, share_out, typed
from attnlab.cli.main import main

CELL = 'seed = 0\nplatform: str = "gfx942"\nlens = "5, 32"\nfast = False\nrate = 0.5\nsource = None'
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def notebook(tmp_path):
    return write_notebook(tmp_path / "01-one.ipynb", "One", "1 + 1", parameters=CELL)


def test_defaults_are_read(notebook, tmp_path):
    assert read_parameters(notebook) == {
        "seed": 0,
        "platform": "gfx942",
        "lens": "5, 32",
        "fast": False,
        "rate": 0.5,
        "source": None,
    }
    assert read_parameters(write_notebook(tmp_path / "02-none.ipynb", "None", "1")) == {}
    (tmp_path / "03-broken.ipynb").write_text("{")
    assert read_parameters(tmp_path / "03-broken.ipynb") == {}


def test_every_committed_notebook_has_parameters_with_defaults_that_hold():
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        found = read_parameters(path)
        assert found, path.stem
        assert share_out({"seed": 1} if "seed" in found else {}, [path])


@pytest.mark.parametrize(
    ("name", "value", "default", "result"),
    [
        ("count", "7", 0, 7),
        ("count", -7, 0, -7),
        ("rate", "0.25", 0.5, 0.25),
        ("rate", 2, 0.5, 2.0),
        ("fast", "yes", False, True),
        ("fast", 1, False, True),
        ("lens", 5, "5, 32", "5"),
        ("free", [1], None, [1]),
        ("dtype", "float32", "bfloat16", "float32"),
        ("source", "", None, ""),
    ],
)
def test_a_value_gets_the_type_of_its_default(name, value, default, result):
    found = typed(name, value, default)
    assert (found, type(found)) == (result, type(result))


def test_a_source_is_found_from_the_notebooks_folder_too(tmp_path, monkeypatch):
    (tmp_path / "vllm.whl").touch()
    monkeypatch.chdir(tmp_path)
    assert typed("source", "vllm.whl", None) == str(tmp_path / "vllm.whl")


WRONG = [
    ({"platfrom": "gfx1100"}, "parameter must be one that a notebook has (fast, lens, platform, "),
    ({"platform": "gfx1"}, "platform must be one of "),
    ({"seed": -1}, "seed must be an integer from 0 to 2147483647, got -1"),
    ({"rate": "x"}, "rate must be a finite number of at least 0, got 'x'"),
    ({"fast": "maybe"}, "fast must be true or false, got 'maybe'"),
    ({"source": "nowhere"}, "source must be a path that exists, got 'nowhere'"),
]


@pytest.mark.parametrize(("given", "line"), WRONG)
def test_each_error_names_the_parameter(notebook, given, line):
    with pytest.raises(InvalidCase) as error:
        share_out(given, [notebook])
    assert str(error.value).startswith(line)


def test_contradicting_values_are_reported_with_the_notebook(tmp_path):
    """A parameter that is not given has its default."""
    cell = "num_heads = 64\nnum_queries_per_kv = 8"
    path = write_notebook(tmp_path / "01-one.ipynb", "One", "1", parameters=cell)
    with pytest.raises(InvalidCase) as error:
        share_out({"num_heads": 12}, [path])
    assert str(error.value).startswith("01-one: ")
    assert error.value.field == "num_queries_per_kv"


@pytest.mark.parametrize("given", [given for given, _ in WRONG])
def test_on_the_command_line_it_is_one_line_and_nothing_runs(notebook, tmp_path, capsys, given):
    words = [f"{name}={value}" for name, value in given.items()]
    folders = ("--notebooks-folder", str(tmp_path), "--reports", str(tmp_path / "r"))
    assert main(["investigate", *folders, "-p", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_notebook_that_refuses_its_parameters_does_not_stop_the_others(tmp_path, capsys):
    """It raises InvalidCase: status refused, exit code 2, and reports are written."""
    refuses = (
        "from attnlab.case.errors import InvalidCase\nraise InvalidCase('odd must be even, got 3')"
    )
    write_notebook(tmp_path / "01-picky.ipynb", "Picky", refuses, parameters="odd = 2")
    write_notebook(tmp_path / "02-other.ipynb", "Other", "1 + 1", parameters="odd = 2")
    folders = ("--notebooks-folder", str(tmp_path), "--reports", str(tmp_path / "r"))
    assert main(["investigate", *folders, "--json", "-p", "odd=3"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [(page["status"], page["message"]) for page in document["notebooks"]] == [
        ("refused", "odd must be even, got 3"),
        ("passed", ""),
    ]
    assert main(["investigate", *folders, "--json"]) == 1  # it refuses its own defaults
    document = json.loads(capsys.readouterr().out)
    assert document["notebooks"][0]["message"] == "InvalidCase: odd must be even, got 3"


def test_an_injected_parameter_that_is_none_is_found():
    check_injected([])
    check_injected(["", CELL, "import torch"])
    check_injected(["", CELL, "# Parameters\nseed = 3\n"])
    with pytest.raises(InvalidCase) as error:
        check_injected(["", CELL, "# Parameters\nseed = 3\nplatfrom = 'x'\n", "more = 1"])
    known = "seed, platform, lens, fast, rate, source"
    assert str(error.value) == f"parameter must be one of {known}, got 'platfrom'"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"sed": 3}, "InvalidCase: parameter must be one of seed, platform, got 'sed'"),
        ({"platform": "gfx1"}, "InvalidCase: platform must be one of gfx90a, "),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_papermill_itself_gets_one_line(tmp_path, given, line):
    """If papermill runs a notebook without attnlab, the error is one line without a traceback."""
    path = write_notebook(
        tmp_path / "01-one.ipynb",
        "One",
        f"{VERDICTS}from attnlab.case.case import Case\nCase(seed=seed, platform=platform)",
        parameters='seed = 0\nplatform = "gfx942"',
    )
    with pytest.raises(PapermillExecutionError) as error:
        execute_notebook(path, None, given, kernel_name="python3", progress_bar=False)
    lines = str(error.value).splitlines()
    assert lines[-1].startswith(line)
    assert "Traceback" not in str(error.value)
    assert error.value.traceback == [lines[-1]]
