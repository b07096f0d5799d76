"""The layout: which folder may import which, no import cycles, and the size of the package and its files."""

import ast
from collections import Counter
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import attnlab

ROOT = Path(attnlab.__file__).parent
# In import order: a folder imports from itself and from those before it.
FOLDERS = (
    "library",
    "case",
    "tensors",
    "contracts",
    "kernels",
    "lab",
    "mla",
    "tasks",
    "defects",
    "weights",
    "diagnosis",
    "linear",
    "mutation",
    "horizon",
    "checker",
    "show",
    "reports",
    "recorder",
    "replay",
    "serving",
    "cli",
)
MAX_ENTRIES = 23
MAX_LINES = 900
MAX_FILES = 25  # of one folder


def files() -> dict[str, Path]:
    """Return every module of the package: its dotted name without "attnlab.", and its file."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = files()


def imports_of(source: str, module: str, modules: Iterable[str] = MODULES) -> set[str]:
    """Return the modules of the package that a source text imports, anywhere in it."""
    is_package = MODULES[module].name == "__init__.py" if module in MODULES else False
    package = ["attnlab", *module.split(".")] if module else ["attnlab"]
    package = package if is_package or not module else package[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            path = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{path}.{alias.name}"
                found.add(inner if inner.partition(".")[2] in modules else path)
    return {name.partition(".")[2] for name in found if name.split(".")[0] == "attnlab"} - {""}


def upward(source: str, module: str) -> list[str]:
    """Return the imports of a module that lead to a folder after its own."""
    own = FOLDERS.index(module.split(".")[0])
    return sorted(n for n in imports_of(source, module) if FOLDERS.index(n.split(".")[0]) > own)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return a cycle of a graph, its first node again at the end; empty if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_follow_the_order_of_folders():
    found = {m: upward(p.read_text(), m) for m, p in MODULES.items() if m.split(".")[0] in FOLDERS}
    assert {module: imports for module, imports in found.items() if imports} == {}


def test_no_import_cycles_between_files():
    graph = {
        module: {n for n in imports_of(path.read_text(), module) if n in MODULES}
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    assert cycle(graph) == []


def test_every_folder_is_in_the_list():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(FOLDERS)


def test_number_of_entries():
    entries = [p for p in ROOT.iterdir() if p.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= MAX_ENTRIES


def test_size_of_a_module():
    sizes = {module: path.read_text().count("\n") for module, path in MODULES.items()}
    assert {module: lines for module, lines in sizes.items() if lines > MAX_LINES} == {}


def test_number_of_files_in_a_folder():
    files_of = Counter(path.parent.name for path in MODULES.values())
    assert [folder for folder, number in files_of.items() if number > MAX_FILES] == []


def test_a_folder_states_what_it_contains():
    folders = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert [path for path in folders if not ast.get_docstring(ast.parse(path.read_text()))] == []


TESTS = Path(__file__).parent


def imported_tests(source: str) -> list[str]:
    """Return the test modules that a source text imports; modules of the package are none."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            path = node.module or ""
            names |= {path, *(f"{path}.{alias.name}" for alias in node.names)}
    names = {name for name in names if name.split(".")[0] != "attnlab"}
    return sorted(n for n in names if n.split(".")[-1].startswith("test_") or n == "conftest")


def test_no_test_imports_a_test():
    found = {path: imported_tests(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: imports for path, imports in found.items() if imports} == {}


def test_tests_mirror_the_folders():
    """Each folder of tests is a folder of the package, except four."""
    own = {p.relative_to(TESTS) for p in TESTS.rglob("*") if p.is_dir() and p.name != "__pycache__"}
    packages = {p.parent.relative_to(ROOT) for p in ROOT.rglob("__init__.py")}
    mirrored = own - {Path(name) for name in ("helpers", "docs", "notebooks", "tools")}
    assert mirrored <= packages
    assert {path.parts[0] for path in mirrored} == set(FOLDERS)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from attnlab.lab.lab import Lab", ["lab.lab"]),
        ("import attnlab.lab.lab", ["lab.lab"]),
        ("import attnlab.lab.lab as r, os", ["lab.lab"]),
        ("from attnlab.lab import lab", ["lab.lab"]),
        ("from ..lab import lab", ["lab.lab"]),
        ("from ..lab.lab import Lab", ["lab.lab"]),
        ("def f():\n    from attnlab.lab.lab import Lab", ["lab.lab"]),
        ("if 1:\n    import attnlab.show.plots", ["show.plots"]),
        ("from attnlab.case.case import Case\nimport torch\nfrom attnlab import __version__", []),
        ("from .batch import Batch", []),
    ],
)
def test_a_planted_import_is_found(source, found):
    assert upward(source, "tensors.cache") == found


def test_a_planted_cycle_is_found():
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_planted_import_of_a_test_is_found():
    assert imported_tests("from helpers.cases import hostile\nfrom test_case import cases") == [
        "test_case"
    ]
    assert imported_tests("import conftest") == ["conftest"]
    assert imported_tests("from lab import test_reads") == ["lab.test_reads"]
    assert imported_tests("from attnlab.case.pytest_id import parse") == []
