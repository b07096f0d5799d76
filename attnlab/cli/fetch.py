"""The command ``attnlab fetch``."""

import argparse

from attnlab.cli.command import Command
from attnlab.cli.output import print_json, progress


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("release", metavar="VERSION", help="the release, for example 0.33.0")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--sdist",
        action="store_true",
        help="download the sdist (10 to 50 MB, with csrc/rocm) instead of the wheel (250 to 500 MB)",
    )
    what.add_argument(
        "--ops",
        action="store_true",
        help="download only the Python files of the attention ops (1 MB), if the package index supports "
        "range requests, and print their folder",
    )


def _run(args: argparse.Namespace) -> int:
    from attnlab.kernels.vllm.release_ops import fetch_ops
    from attnlab.kernels.vllm.sdist import fetch_sdist
    from attnlab.kernels.vllm.source import fetch, find_source

    download = fetch_ops if args.ops else fetch_sdist if args.sdist else fetch
    with progress(f"downloading vLLM {args.release}"):
        path = download(args.release)
        source = find_source(path)
    if args.json:
        print_json({"version": source.version, "path": str(path), "ops": str(source.root)})
    else:
        print(path)
    return 0


COMMAND = Command(
    name="fetch",
    purpose="Download a release of vLLM with pip, for --source, and print its path.",
    arguments="VERSION",
    examples=("attnlab run --backend vllm --source $(attnlab fetch 0.33.0)",),
    exit_codes="0 downloaded, now or earlier",
    add_flags=_add_flags,
    run=_run,
)
