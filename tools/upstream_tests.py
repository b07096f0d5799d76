"""Run a library's own attention tests on a machine without GPU, and count the faults that they notice.

    python tools/upstream_tests.py lmdeploy SOURCE TEST_FILE [-k EXPRESSION] --out power.json

SOURCE is a checkout, a wheel or an sdist of the library. Its Triton kernels run under the lab's interpreter:
the modules that attnlab's records of the library name are imported as for ``attnlab check``, and a test that
asks for a CUDA device gets the CPU. ``--attnlab-power`` says which defects each passing test would notice.
``--op MODULE:FUNCTION`` names the functions whose calls are recorded. ``--reduce "OLD => NEW"`` replaces a
text of the test file, such as a size that is too large for an interpreter; the output states them.
``--answer`` states what a function of the library returns that asks about the GPU. ``--faults N`` plants
N faults by the rules of tools/source_mutation.py, one after the other. For each test that fails, the output
has what ``--attnlab`` states about it.
"""

import argparse
import contextlib
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import source_mutation
import torch

from attnlab.case.platforms import PLATFORMS
from attnlab.kernels.triton.interpreter import interpreted_triton
from attnlab.kernels.vllm.loader import Loader, OnCpu, Stub, package_stubs
from attnlab.kernels.vllm.source import find_source
from attnlab.library.op import ops_of, package_of
from attnlab.library.sglang import ENVS as SGLANG_ENVS

_FAILED = ("failure", "error")
_LABELS = ("op", "wrong_side", "diagnosis", "evidence", "not_decided", "not_read")  # of a report
SETTINGS = "ATTNLAB_UPSTREAM"  # JSON for the process that runs the tests


@contextlib.contextmanager
def _with_env(*, allow_sglang: bool = False, **names: str) -> Iterator[None]:
    """Set environment variables inside the context."""
    before = dict(os.environ)
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Setting:
    """A setting of SGLang: that of the environment, or else its default."""

    def __init__(self, name: str, default: bool) -> None:
        self._name, self._default = name, default

    def get(self) -> bool:
        """Return the value."""
        return os.environ.get(self._name, str(self._default)).lower() in ("1", "true", "yes")


def _nothing(*args: Any, **named: Any) -> None:
    """Return None."""


# Modules that a library's tests import, besides those of its ops and what replaces the rest.
_MODULES = {"sglang": ("sglang.test.kernels.extend_attention",)}
# What a library's tests take from its modules that are not kernels, by module and name. Other names of these
# modules raise an error when they are called.
_HELPERS: dict[str, dict[str, dict[str, Any]]] = {
    "aiter": {"aiter.test_common": {}, "op_tests.triton_tests.quant.test_quant_mxfp4": {}},
    "sglang": {
        "sglang.srt.utils": {"get_device": lambda: "cuda"},
        "sglang.srt.utils.common": {"temp_set_env": _with_env},
        "sglang.srt.environ": {
            "envs": SimpleNamespace(**{n: _Setting(n, one) for n, one in SGLANG_ENVS.items()})
        },
        "sglang.test.ci.ci_register": dict.fromkeys(
            ("register_cuda_ci", "register_amd_ci"), _nothing
        ),
        "sglang.test.test_utils": {
            "CustomTestCase": unittest.TestCase,
            "is_in_amd_ci": lambda: False,
        },
    },
}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the library importable before attnlab records and the tests are collected."""
    given = json.loads(os.environ[SETTINGS])
    package = package_of(given["library"])
    further = _MODULES.get(package.name, ())
    folders = (one.rpartition(".")[0].replace(".", "/") for one in further)
    package = replace(package, folders=(*package.folders, *folders))
    stubs = package_stubs(package, PLATFORMS[given["platform"]], interpreted_triton())
    helpers = _HELPERS.get(package.name, {})
    for name, content in helpers.items():
        vars(stubs.setdefault(name, Stub(name))).update(content)
    source = find_source(given["source"], package)
    loader = Loader(source, stubs)
    exported: dict[str, dict[str, Any]] = {}
    for name in given["modules"]:
        module = loader.load(name)
        functions = {n: one for n, one in vars(module).items() if inspect.isfunction(one)}
        exported.setdefault(str(module.__package__), {}).update(functions)
    for name in (*helpers, *further):
        loader._import(name)
    for name, module in loader._modules.items():
        if name.partition(".")[0] in {one.partition(".")[0] for one in (package.name, *helpers)}:
            vars(module).setdefault("__path__", [str(source.root / name.replace(".", "/"))])
            sys.modules[name] = module
    for one, _, answer in (text.partition("=") for text in given["answers"]):
        module, _, function = one.partition(":")
        stub = sys.modules.setdefault(module, ModuleType(module))
        vars(stub)[function] = lambda *args, answer=answer: answer
        vars(sys.modules[module.rpartition(".")[0]])[module.rpartition(".")[2]] = stub
    for name, functions in exported.items():  # what the package exports
        vars(sys.modules[name]).update(functions)
    torch.cuda.is_available = lambda: True
    for name in ("get_device_capability", "get_device_name", "get_device_properties"):
        setattr(torch.cuda, name, getattr(stubs["torch"].cuda, name))
    for name in ("manual_seed", "manual_seed_all", "set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    on_cpu = OnCpu()
    on_cpu.__enter__()
    config.add_cleanup(lambda: on_cpu.__exit__(None, None, None))


def planted(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Plant faults by rules in the kernels, one after the other; yield each with the tests that fail."""
    source = find_source(args.source, package_of(args.library))
    wanted = {one.partition(":")[0].rpartition(".")[2] for one in args.op}
    files = sorted(
        file
        for folder in source.ops_folders
        for name in wanted
        for file in (source.root / folder).rglob(f"{name}.py")
    )
    every = [(file, one) for file in files for one in source_mutation.mutants(file.read_text())]
    for file, mutant in random.Random(args.seed).sample(every, min(args.faults, len(every))):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "source"
            shutil.copytree(
                source.root, root, ignore=shutil.ignore_patterns(".git", "csrc", "3rdparty")
            )
            (root / file.relative_to(source.root)).write_text(mutant.apply(file.read_text()))
            found = run(args, Path(folder), root, scores=False)
            yield {
                **{
                    "file": file.name,
                    "line": mutant.line,
                    "rule": mutant.rule,
                    "before": mutant.before,
                },
                **{"after": mutant.after, "failed": found["statements"]},
            }


def run(args: argparse.Namespace, folder: Path, root: Path, scores: bool = True) -> dict[str, Any]:
    """Run the tests in a folder with the library at ``root``; return their outcomes and statements.

    ``scores``: their powers, too.
    """
    tests = folder / "tests"
    shutil.copytree(args.tests.parent, tests)
    file = tests / args.tests.name
    for old, _, new in (one.partition(" => ") for one in args.reduce):
        text = file.read_text()
        if old not in text:
            raise SystemExit(f"--reduce must name a text of {file.name}, got {old}")
        file.write_text(text.replace(old, new))
    modules = [op.module for op in ops_of(args.library)] if not args.op else []
    modules += [one.partition(":")[0].rpartition(".")[2] for one in args.op]
    settings = {
        **{"library": args.library, "source": str(root.absolute())},
        **{"platform": args.platform, "modules": list(dict.fromkeys(modules))},
        "answers": args.answer,
    }
    recorded = "\n".join(args.op)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "upstream_tests", "-p", "no:cacheprovider"),
        *(
            "--attnlab",
            f"--attnlab-seconds={args.seconds:g}",
            f"--attnlab-dir={args.keep}",
            *(("--attnlab-power-json", "power.json") if scores else ()),
            "--junitxml=junit.xml",
            "-o",
            f"attnlab_ops={recorded}",
        ),
        *(str(file), "-k", args.k, "--tb=short", "--no-header"),
    ]
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    known = {
        **os.environ,
        SETTINGS: json.dumps(settings),
        "PYTHONPATH": path,
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env=known, text=True, capture_output=True, check=False
    )
    print(done.stdout[-6000:], done.stderr[-3000:], file=sys.stderr)
    outcomes: dict[str, str] = {}
    statements: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        name = str(case.get("name"))
        kinds = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
        outcomes[name] = kinds[0] if kinds else outcomes.get(name, "passed")
        facts = {str(one.get("name")): str(one.get("value")) for one in case.iter("property")}
        if any(one in _FAILED for one in kinds):
            statements[name] = {label: facts.get(f"attnlab_{label}", "") for label in _LABELS}
    powers = json.loads((folder / "power.json").read_text()) if scores else []
    return {
        **{"outcomes": outcomes, "statements": statements},
        **{"powers": powers, "reduced": args.reduce},
    }


def main() -> None:
    """Run the tests of a file, and write their outcomes and powers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("library")
    parser.add_argument("source", type=Path)
    parser.add_argument("tests", type=Path)
    parser.add_argument("-k", default="")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--answer", action="append", default=[], metavar="MODULE:FUNCTION=TEXT")
    parser.add_argument("--platform", default="sm_90")
    parser.add_argument("--reduce", action="append", default=[], metavar="OLD => NEW")
    parser.add_argument("--faults", type=int, default=0, help="plant so many faults in the kernels")
    parser.add_argument("--seconds", type=float, default=0.0, help="for runs of a failing kernel")
    parser.add_argument("--keep", default="attnlab-failures", help="for calls of failing tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(args, Path(folder), args.source)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for one in planted(args) if args.faults else ():
        found.setdefault("faults", []).append(one)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
