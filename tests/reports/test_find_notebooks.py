"""Notebooks are found by name; bad input and unwritable reports are one line."""

import os

import pytest
from helpers.notebooks import write_notebook

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.reports import investigate as module
from attnlab.reports.investigate import find_notebooks, investigate


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
            timeout_s=9,
        )
    assert str(error.value) == (
        "parameter must be one that a notebook has (platform, seed), got 'plattform'"
    )
    assert not (names / "r").exists()


def test_reports_that_cannot_be_written_are_one_line(names):
    (names / "file").write_text("in the way")
    with pytest.raises(AttnLabError) as error:
        investigate(
            find_notebooks(["3"], names), parameters={}, reports=names / "file", timeout_s=9
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
                find_notebooks(["3"], names), parameters={}, reports=names / "r", timeout_s=9
            )
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "name", ["index.html", "verdicts.json", "03-cast.html", "executed/03-cast.ipynb"]
)
def test_a_folder_in_the_way_of_a_report_is_one_line(names, name):
    (names / "r" / name).mkdir(parents=True)
    with pytest.raises(AttnLabError) as error:
        investigate(find_notebooks(["3"], names), parameters={}, reports=names / "r", timeout_s=9)
    assert str(error.value) == f"{names}/r/{name} must be a regular file or a new one"


def test_without_jupyter_the_error_says_what_to_install(names, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install 'attnlab\[lab\]'"):
        investigate([], parameters={}, reports=names / "r", timeout_s=9)
