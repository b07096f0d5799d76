"""Commands that list a catalogue of the lab, or explain one entry of it."""

import argparse
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attnlab import __version__
from attnlab.case.errors import AttnLabError
from attnlab.case.fields import refuse
from attnlab.case.platforms import PLATFORMS
from attnlab.case.stages import STAGES
from attnlab.cli.command import Command, described, print_json, progress, show
from attnlab.library.op import package_of
from attnlab.show.sheets.sheet import Facts, Grid, Row, Sheet, Words

# Sheets of a catalogue: a table of all entries, and the facts of one.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """What a command lists.

    - ``noun``: the name of one entry, such as "stage"; the command is its plural.
    - ``load`` returns each entry's facts by its name; ``columns`` are the facts that the list shows.
    """

    noun: str
    purpose: str
    example: str
    columns: Sequence[str]
    load: Callable[[], Mapping[str, Mapping[str, Any]]]

    @property
    def command(self) -> Command:
        """Return the command of the catalogue."""
        plural = f"{self.noun}s"
        return Command(
            name=plural,
            purpose=self.purpose,
            arguments="[NAME]",
            examples=(f"attnlab {plural}", f"attnlab {plural} {self.example}"),
            exit_codes="0 always",
            add_flags=self._add_flags,
            run=self._run,
            notes="--json prints one object with the facts of each entry by its name, or of NAME alone.",
        )

    def _add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "entry", nargs="?", metavar="NAME", help=f"explain this {self.noun} (default: list all)"
        )

    def _run(self, args: argparse.Namespace) -> int:
        entries = self.load()
        if args.entry is not None and args.entry not in entries:
            refuse(self.noun, f"one of {', '.join(entries)}", args.entry)
        chosen = entries if args.entry is None else {args.entry: entries[args.entry]}
        if args.json:
            print_json(chosen if args.entry is None else chosen[args.entry])
        elif args.entry is None:
            show(list_sheet(self.noun, chosen, self.columns))
        else:
            show(one_sheet(self.noun, args.entry, chosen[args.entry]))
        return 0


# The command ``attnlab defects``.


def _load_defects() -> dict[str, dict[str, Any]]:
    """Return the facts of each defect. This imports torch."""
    from attnlab.defects import DEFECTS

    return {
        name: {
            "what_happens": defect.text,
            "family": defect.family,
            "rows_it_can_change": defect.touches,
            "changes_only_rounding": defect.harmless,
            "violations_that_cause_it": list(defect.links),
            "reported_in": list(defect.seen_in),
        }
        for name, defect in DEFECTS.items()
    }


DEFECTS_COMMAND = Catalogue(
    noun="defect",
    purpose="List the defects that a diagnosis recognises and that power plants in a test's kernels.",
    example="kv_head_modulo",
    columns=("what_happens", "family"),
    load=_load_defects,
).command


# The command ``attnlab platforms``.


def _load_platforms() -> dict[str, dict[str, Any]]:
    """Return the facts of each platform."""
    return {
        name: {
            "example": platform.example,
            "family": platform.family,
            "format_of_fp8": platform.fp8_e4m3,
            "runs_rocm_code": platform.is_rocm,
            "triton_converts_e4m3": platform.triton_e4m3,
        }
        for name, platform in PLATFORMS.items()
    }


PLATFORMS_COMMAND = Catalogue(
    noun="platform",
    purpose="List the platforms whose dispatch and formats the lab models.",
    example="gfx942",
    columns=("example", "family", "format_of_fp8", "triton_converts_e4m3"),
    load=_load_platforms,
).command


# The command ``attnlab stages``.


def _load_stages() -> dict[str, dict[str, Any]]:
    """Return the facts of each stage."""
    return {
        name: {
            "meaning": stage.story,
            "block_table": stage.block_table,
            "seq_lens": stage.seq_lens,
            "query_start_loc": stage.query_start_loc,
            "fill": stage.fill,
            "wrapper_cast": stage.wrapper_cast,
        }
        for name, stage in STAGES.items()
    }


STAGES_COMMAND = Catalogue(
    noun="stage",
    purpose="List the stages of vLLM's test: dtypes of its index tensors, and what it writes to the cache.",
    example="int32_before_cumsum",
    columns=("meaning", "query_start_loc", "fill"),
    load=_load_stages,
).command


# The command ``attnlab env``.

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
        "cores": _cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
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


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cache_folder() -> str:
    from attnlab.kernels.cache_folder import cache_folder

    folder = cache_folder()
    if not folder.exists():
        return f"{folder} (not created yet)"
    return str(folder) if os.access(folder, os.W_OK) else f"{folder} (not writable)"


def _env(args: argparse.Namespace) -> int:
    facts = environment()
    if args.json:
        print_json(facts)
        return 0
    show(one_sheet("environment", f"attnlab {__version__}", facts))
    return 0


ENV_COMMAND = described("env", _env)


# The command ``attnlab fetch``.


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


FETCH_COMMAND = described("fetch", _fetch)
