"""Commands that list a catalogue of the lab, or explain one entry of it."""

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attnlab import __version__
from attnlab.case.errors import AttnLabError
from attnlab.case.fields import refuse
from attnlab.case.machine import cores, total_bytes
from attnlab.case.platforms import PLATFORMS, STAGES
from attnlab.cli.command import print_json, progress, runs, show
from attnlab.library.op import package_of
from attnlab.show.sheets.sheet import Facts, Grid, Row, Sheet, Words


def list_sheet(
    noun: str, entries: Mapping[str, Mapping[str, Any]], columns: Sequence[str]
) -> Sheet:
    """Return a row for each entry, with the facts in ``columns``."""
    rows: list[Row] = [
        [Words(name, code=True), *(_text(facts[column]) for column in columns)]
        for name, facts in entries.items()
    ]
    titles = [noun, *(column.replace("_", " ") for column in columns)]
    table = Grid(titles, rows, most=len(rows))
    return Sheet.of(f"{noun.capitalize()}s", str(len(entries)), table)


def one_sheet(noun: str, name: str, facts: Mapping[str, Any]) -> Sheet:
    """Return every fact of an entry."""
    rows = [(fact.replace("_", " "), _text(value)) for fact, value in facts.items()]
    return Sheet.of(noun.capitalize(), Words(name, code=True), Facts(rows))


def _text(value: Any) -> str:
    """Return a fact as text: yes or no, and lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _print(
    args: argparse.Namespace,
    noun: str,
    entries: Mapping[str, Mapping[str, Any]],
    columns: Sequence[str],
) -> int:
    """Print one entry of a catalogue, or all, with the facts in ``columns``."""
    if args.entry is not None and args.entry not in entries:
        refuse(noun, f"one of {', '.join(entries)}", args.entry)
    if args.json:
        print_json(entries if args.entry is None else entries[args.entry])
    elif args.entry is None:
        show(list_sheet(noun, entries, columns))
    else:
        show(one_sheet(noun, args.entry, entries[args.entry]))
    return 0


def _entries(catalogue: Mapping[str, Any], facts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the entries of a catalogue; ``facts``: the attribute that holds each fact."""
    return {
        name: {fact: getattr(one, attribute) for fact, attribute in facts.items()}
        for name, one in catalogue.items()
    }


@runs("defects")
def _defects(args: argparse.Namespace) -> int:
    from attnlab.defects import DEFECTS

    facts = {
        "what_happens": "text",
        "family": "family",
        "rows_it_can_change": "touches",
        "changes_only_rounding": "harmless",
        "violations_that_cause_it": "links",
        "reported_in": "seen_in",
    }
    return _print(args, "defect", _entries(DEFECTS, facts), ("what_happens", "family"))


@runs("platforms")
def _platforms(args: argparse.Namespace) -> int:
    facts = {
        "example": "example",
        "family": "family",
        "format_of_fp8": "fp8_e4m3",
        "runs_rocm_code": "is_rocm",
        "triton_converts_e4m3": "triton_e4m3",
    }
    columns = ("example", "family", "format_of_fp8", "triton_converts_e4m3")
    return _print(args, "platform", _entries(PLATFORMS, facts), columns)


@runs("stages")
def _stages(args: argparse.Namespace) -> int:
    same = ("block_table", "seq_lens", "query_start_loc", "fill", "wrapper_cast")
    entries = _entries(STAGES, {"meaning": "story", **dict(zip(same, same, strict=True))})
    return _print(args, "stage", entries, ("meaning", "query_start_loc", "fill"))


_PACKAGES = ("torch", "triton", "numpy")


def environment() -> dict[str, Any]:
    """Return what an issue report needs; a fact that cannot be found says why."""
    return {
        "attnlab": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{package: _version(package) for package in _PACKAGES},
        "vllm": _vllm(),
        "gpu": _gpu(),
        "compiler": _compiler(),
        "cores": cores(),
        "memory_gib": round(total_bytes() / 2**30, 1),
        "cache_folder": _cache_folder(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _vllm() -> str:
    """Return the installed vLLM and its folder."""
    from attnlab.kernels.vllm.source import find_source

    try:
        source = find_source(None)
    except AttnLabError:
        return "not installed"
    return f"{source.version} in {source.root}"


def _gpu() -> str:
    """Return the name of the GPU that torch can use, with the version of its driver API."""
    try:
        import torch

        if not torch.cuda.is_available():
            return "none that torch can use"
        api = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()} ({api})"
    except Exception as error:  # a broken installation is what a report must show
        return " ".join(f"{type(error).__name__}: {error}".split())


def _compiler() -> str:
    """Return the C++ compiler of backend rocm: the first line of its --version."""
    from attnlab.kernels.rocm.device import find_compiler

    try:
        compiler = find_compiler(os.environ.get("CXX"))
    except AttnLabError as error:
        return str(error)
    lines = compiler.version.splitlines() or [""]
    return f"{compiler.command}: {lines[0]}"


def _cache_folder() -> str:
    from attnlab.kernels.cache_folder import cache_folder

    folder = cache_folder()
    if not folder.exists():
        return f"{folder} (not created yet)"
    return str(folder) if os.access(folder, os.W_OK) else f"{folder} (not writable)"


@runs("env")
def _env(args: argparse.Namespace) -> int:
    facts = environment()
    if args.json:
        print_json(facts)
        return 0
    show(one_sheet("environment", f"attnlab {__version__}", facts))
    return 0


@runs("fetch")
def _fetch(args: argparse.Namespace) -> int:
    from attnlab.kernels.vllm.source import fetch, fetch_ops, fetch_sdist, find_source

    package = package_of(args.library)
    if args.sdist and args.library != "vllm":
        refuse("library", "vllm with sdist", args.library)
    download = fetch_ops if args.ops else fetch
    with progress(f"downloading {package.title} {args.release}"):
        path = fetch_sdist(args.release) if args.sdist else download(args.release, package)
        source = find_source(path, package)
    if args.json:
        print_json({"version": source.version, "path": str(path), "ops": str(source.root)})
    else:
        print(path)
    return 0
