"""The command ``attnlab env``."""

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attnlab import __version__
from attnlab.case.errors import AttnLabError
from attnlab.case.fields import refuse
from attnlab.case.flags import flag
from attnlab.cli.command import Command, add_library, print_json, progress, show
from attnlab.library.op import package_of

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
    from attnlab.kernels.rocm.build import find_compiler

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
    from attnlab.cli.catalogue import one_sheet

    show(one_sheet("environment", f"attnlab {__version__}", facts))
    return 0


ENV_COMMAND = Command(
    name="env",
    purpose="Print the versions and the machine, for an issue report.",
    examples=("attnlab env", "attnlab env --json"),
    exit_codes="0 always",
    run=_env,
)


# The command ``attnlab fetch``.


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("release", metavar="VERSION", help="the release, for example 0.33.0")
    what = parser.add_mutually_exclusive_group()
    flag(
        what,
        "--sdist",
        "download the sdist (10 to 50 MB, with csrc/rocm) instead of the wheel (250 to 500 MB)",
    )
    flag(
        what,
        "--ops",
        "download only the Python files of the attention ops (1 MB), if the package index supports "
        "range requests, and print their folder",
    )
    add_library(parser)


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


FETCH_COMMAND = Command(
    name="fetch",
    purpose="Download a release of vLLM, or of another library, with pip, for --source; print its path.",
    arguments="VERSION",
    examples=(
        "attnlab run --backend vllm --source $(attnlab fetch 0.33.0)",
        "attnlab fetch --library sglang --ops 0.5.23",
    ),
    exit_codes="0 downloaded, now or earlier",
    add_flags=_add_flags,
    run=_fetch,
)
