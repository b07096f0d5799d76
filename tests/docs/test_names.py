"""Every flag, public name, module and file that the documentation names exists."""

import argparse
import re
from pathlib import Path

import bench
import pytest
import snippets

import attnlab
from attnlab.case.declaration import CaseFields
from attnlab.cli.main import COMMANDS, make_parser
from attnlab.recorder import pytest_plugin

ROOT = Path(__file__).parent.parent.parent

PAGES = [*snippets.pages(), ROOT / "SECURITY.md"]
# A pattern, and two files of another project.
OTHER_FILES = {
    "notebooks/NN-slug.ipynb",
    "docs/Features.md",
    "docs/Device_API_support_matrix.md",
}
FOREIGN = {
    *("--quiet", "--editable", "--write", "--check", "--numprocesses"),  # pip, pytest, tools/
    "--wheel",  # tools/vllm_tests.py
    "--from",  # uvx
    *("--enforce-eager", "--compilation-config"),  # vllm serve
    *("--model-path", "--attention-backend", "--disable-cuda-graph"),  # sglang.launch_server
    *("--head", "--port", "--address"),  # ray start
}


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return a parser and those of its subcommands."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found += parsers(child)
    return found


FLAGS = {
    flag
    for parser in [*parsers(make_parser()), bench.make_parser()]
    for action in parser._actions
    for flag in action.option_strings
} | set(re.findall(r'"(--[a-z-]+)"', Path(pytest_plugin.__file__).read_text()))


def prose(text: str) -> str:
    """Return a page without what its commands print; commands and code stay."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```console"
        elif not inside or line.startswith("$ "):
            lines.append(line)
    return "\n".join(lines)


def unknown_flags(text: str) -> set[str]:
    """Return the flags in a page that no command has."""
    own = "\n".join(
        line for line in prose(text).splitlines() if not re.search(r"\b(pip|conda|pytest) ", line)
    )
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", own)) - FLAGS - FOREIGN


def has_module(dotted: str) -> bool:
    """Answer whether ``dotted`` is a module of attnlab, or a name in one."""
    parts = dotted.split(".")
    path = ROOT.joinpath(*parts)
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    parent = ROOT.joinpath(*parts[:-1])
    file = parent / "__init__.py" if parent.is_dir() else parent.with_suffix(".py")
    return file.is_file() and re.search(rf"\b{parts[-1]}\b", file.read_text()) is not None


def unknown_names(text: str) -> set[str]:
    """Return the names ``attnlab.x`` in a page that are neither public nor modules."""
    found = {
        name.rstrip(".")
        for name in re.findall(r"(?<![\w/.-])attnlab(?:\.[A-Za-z_]\w*)+", prose(text))
    }
    return {
        name
        for name in found - {"attnlab.kernels", "attnlab.ops"}  # entry-point groups
        if name.split(".")[1] not in (*attnlab.__all__, "__version__") and not has_module(name)
    }


def missing_files(text: str) -> set[str]:
    """Return the paths of this repository in a page that do not exist."""
    found = re.findall(r"`((?:attnlab|tests|tools|notebooks|examples|docs)/[\w./-]+)`", prose(text))
    return {path for path in set(found) - OTHER_FILES if not (ROOT / path).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unknown_flags(text) == set()
    assert unknown_names(text) == set()
    assert missing_files(text) == set()


def test_planted_names_are_found() -> None:
    text = (
        "`attnlab run --empty zeros` and `attnlab.Breach`, in `attnlab/breaches.py`; "
        "`attnlab.diagnosis.survey.survey`\n"
        "```console\n$ attnlab run --checked true\nprinted --nothing\n```\n"
    )
    assert unknown_flags(text) == {"--empty", "--checked"}
    assert unknown_names(text) == {"attnlab.Breach", "attnlab.diagnosis.survey.survey"}
    assert missing_files(text) == {"attnlab/breaches.py"}


def names_in_table(start: str) -> list[list[str]]:
    """Return the cells of each row of the first table of CHANGELOG.md after ``start``."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    lines = text[text.index(start) :].splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        rows.append(line.strip("|").split(" | "))
    return rows


def test_the_fields_of_the_changelog_exist() -> None:
    rows = names_in_table("Fields of a Case, and their flags")
    fields = set(CaseFields.__dataclass_fields__)
    assert {now.strip(" `") for _, now in rows} <= fields
    assert not {before.strip(" `") for before, _ in rows} & fields


def test_every_command_has_a_guide_and_a_row() -> None:
    """Each command has a how-to guide, a row in its index, and a row in the README."""
    index = (ROOT / "docs/howto/index.md").read_text()
    readme = (ROOT / "README.md").read_text()
    names = [command.name for command in COMMANDS]
    assert [n for n in names if f"]({n}.md)" not in index] == []
    assert [n for n in names if f"](docs/howto/{n}.md)" not in readme] == []
    assert [n for n in names if not (ROOT / f"docs/howto/{n}.md").is_file()] == []
