"""Modules import only their own floor and those below it."""

import ast
from pathlib import Path

import pytest

import attnlab

ROOT = Path(attnlab.__file__).parent
FLOORS = [  # from the ground up
    {"errors", "knobs", "platforms", "stages", "lengths", "shown", "case", "rules", "testid"},
    {"formats", "batch", "fill", "cache", "call"},
    {"dispatch", "contracts", "breaches", "slot_use"},
    {"kernels", "hip"},
    {"reference", "compare", "memory", "cache_write", "noise"},
    {"defects"},
    {"survey", "probes"},
    {"result", "sharing"},
    {"run"},
    {"decode_error", "stage_table", "timeline"},
    {"sample", "suspects", "diagnosis", "separate", "mutants", "remedies"},
    {"judgement", "diagnose", "planting", "power"},
    {"sanitize"},
    {
        "parameters",
        "baseline",
        "production",
        "plots_cache",
        "plots_memory",
        "plots_reads",
        "plots_power",
        "plots_timeline",
        "plots_story",
        "plots",
        "notebook",
        "outcome",
    },
    {"claims"},
    {
        "offline",
        "report",
        "pictures",
        "headless",
        "investigate",
        "engine",
        "bench",
        "bench_diagnose",
        "bench_interpreter",
        "bench_rocm",
        "chapters",
        "diagnosing",
        "display",
        "flags",
        "terminal",
        "terminal_diagnosis",
        "cli",
        "cli_check",
        "widgets",
        "cli_investigate",
        "terminal_outcomes",
    },
]
PACKAGES = tuple(
    f"attnlab{name}"
    for name in ("", ".claims", ".defects", ".display", ".hip", ".kernels", ".sanitize", ".widgets")
)
GROUND = -1  # the package itself, which imports nothing


def floor_of(module: str) -> int:
    """Return the floor of a module by its name inside the package; fail where it has none."""
    top = module.partition(".")[0]
    if top in ("", "__init__"):
        return GROUND
    for floor, modules in enumerate(FLOORS):
        if top in modules:
            return floor
    pytest.fail(f"attnlab.{module} stands on no floor: add it to FLOORS in tests/test_floors.py")


def imports_of(source: str, module: str) -> set[str]:
    """Return the modules of the package that a source text imports, wherever in it, by inner name."""
    package = ["attnlab", *module.split(".")][:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            path = ".".join([*base, *([node.module] if node.module else [])])
            inner = path in PACKAGES
            names = [f"{path}.{alias.name}" for alias in node.names] if inner else [path]
        found |= {name for name in names if name.split(".")[0] == "attnlab"}
    return {name.partition(".")[2] for name in found} - {"", "__version__"}


def upward(source: str, module: str) -> list[str]:
    """Return the imports of a module that lead to a higher floor."""
    return sorted(name for name in imports_of(source, module) if floor_of(name) > floor_of(module))


def module_names() -> list[str]:
    """Return every module of the package by its inner name."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix("__init__").rstrip(".") for path in paths)


@pytest.mark.parametrize("module", module_names())
def test_imports_lead_down(module):
    """Each module stands on a floor and imports from no higher one."""
    path = ROOT.joinpath(*module.split(".")) if module else ROOT
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert upward(path.read_text(), module) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from attnlab.run import Lab", ["run"]),
        ("import attnlab.run", ["run"]),
        ("import attnlab.run as r, os", ["run"]),
        ("from attnlab import run", ["run"]),
        ("from . import run", ["run"]),
        ("from .kernels import model", ["kernels.model"]),
        ("from .kernels.model import run", ["kernels.model"]),
        ("def f():\n    from attnlab.run import Lab", ["run"]),
        ("if 1:\n    import attnlab.compare", ["compare"]),
        ("from attnlab.case import Case\nimport torch\nfrom attnlab import __version__", []),
    ],
)
def test_a_planted_import_is_caught(source, found):
    """An upward import of any form is found in a module of the ground floor, a downward one is not."""
    assert upward(source, "cache") == found


def test_a_relative_import_from_inside_a_package():
    """``..run`` in a kernel is the package's run."""
    assert upward("from ..run import Lab", "kernels.model") == ["run"]
    assert upward("from .paged import keys", "kernels.model") == []


def test_a_module_without_a_floor_fails():
    """A new module must be put on a floor, and the message says where."""
    with pytest.raises(pytest.fail.Exception, match=r"attnlab\.newcomer stands on no floor"):
        floor_of("newcomer")
    with pytest.raises(pytest.fail.Exception, match="newcomer"):
        upward("from attnlab.newcomer import x", "case")


def test_no_module_stands_on_two_floors():
    """The floors share nothing."""
    assert sum(map(len, FLOORS)) == len(set().union(*FLOORS))
