"""Every snippet of README.md, CONTRIBUTING.md and docs/ runs and prints what the page states."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import snippets

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def no_warning_filter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("MPLBACKEND", "agg")
    return snippets


def _cases() -> list[object]:
    """Return each page once per marker: quick snippets, and all snippets of a page that has others."""
    cases = []
    for page in snippets.pages():
        name = str(page.relative_to(ROOT))
        asked = snippets.markers(page)
        if any(not s.note for s in snippets.snippets(page)):
            cases.append(pytest.param(page, set(), id=name))
        if asked:
            marks = [getattr(pytest.mark, marker) for marker in sorted(asked)]
            cases.append(pytest.param(page, asked, id=f"{name}-all", marks=marks))
    return cases


@pytest.mark.parametrize(("page", "allowed"), _cases())
def test_snippets_of_a_page(page: Path, allowed: set[str]) -> None:
    wrong = [
        (snippet.name, command, printed)
        for snippet, results in snippets.run_page(page, allowed)
        for command, printed, same in results
        if not same
    ]
    assert wrong == [], "run: python tools/snippets.py --write"


def test_every_skip_states_its_reason() -> None:
    notes = {s.note for page in snippets.pages() for s in snippets.snippets(page)}
    assert [
        n for n in notes if n not in ("", "slow", "releases") and not n.startswith("skip: ")
    ] == []


def planted(text: str, kind: str = "python") -> snippets.Snippet:
    return snippets.Snippet(page=ROOT / "README.md", line=1, kind=kind, text=text, note="")


def test_a_wrong_value_is_found() -> None:
    snippets.run_python(planted("x = 2\nx + 1  # 3\n"), {})
    with pytest.raises(AssertionError, match="is 3, not 4"):
        snippets.run_python(planted("x = 2\nx + 1  # 4\n"), {})


def test_a_snippet_that_raises_is_found() -> None:
    with pytest.raises(NameError):
        snippets.run_python(planted("print(undefined)\n"), {})


@pytest.mark.parametrize(
    ("printed", "stated", "same"),
    [
        ("a\nb\n", ["a", "b"], True),
        ("a\nb\n", ["a", "c"], False),
        ("a\nb\nc\n", ["a", "..."], True),
        ("a\nb\nc\n", ["b", "..."], False),
        ("a\nb\n", ["a", "b", "..."], True),
        ("error 1.2e-06 in 3 s", ["error 1.1e-06 in 12.5 s"], True),
        ("error 1.2e-06", ["error 1.2e-05"], False),
        ("8192 of 10", ["8193 of 10"], False),
    ],
)
def test_output_is_compared(printed: str, stated: list[str], same: bool) -> None:
    assert snippets.is_like(printed, stated) is same


def test_a_command_that_fails_is_found() -> None:
    with pytest.raises(RuntimeError, match="exit code 2"), snippets.workplace():
        snippets.run_console(planted("$ attnlab explain --platform gfx1\n", "console"))


@pytest.mark.parametrize("line", ["make nothing", "make docs nothing"])
def test_a_target_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(AssertionError, match="nothing"):
        snippets.check_sh(planted(line + "\n", "sh"))


def test_the_site_shows_what_the_first_example_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first example of a how-to is run; one that fails ends the build."""
    page = ROOT / "docs" / "howto" / "replay.md"
    text, ran = page.read_text(), []
    monkeypatch.setattr(snippets, "run_command", lambda command: ran.append(command) or (0, "new"))
    shown = snippets.with_first_example(page)
    first, last = ran
    assert f"$ {first}\nnew\n...\n$ {last}\nnew\n```" in shown
    assert shown.partition("With releases of vLLM")[2] == text.partition("With releases of vLLM")[2]
    monkeypatch.setattr(snippets, "run_command", lambda command: (2, "refused"))
    with pytest.raises(RuntimeError, match="exit code 2"):
        snippets.with_first_example(page)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("myst_nb") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Internal links are checked; the notebooks are included without their outputs."""
    import subprocess

    monkeypatch.setenv("ATTNLAB_DOCS_EXECUTE", "0")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q"]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    pages = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.html")}
    assert {"index.html", "tutorial.html", "api.html", "notebooks/00-start-here.html"} <= pages
