"""The command ``attnlab horizon``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.errors import InvalidCase
from attnlab.case.flags import flag
from attnlab.cli import command
from attnlab.cli.command import Command, progress, put

if TYPE_CHECKING:
    from attnlab.horizon.deployment import Deployment
    from attnlab.horizon.survey import Survey

_FLAGS = {
    "heads": "query heads",
    "kv_heads": "KV heads",
    "head_size": "elements of a key",
    "layers": "layers",
    "block_size": "tokens of a block",
    "gpu_memory": "GB of the GPU's memory",
    "max_context": "tokens of a sequence",
    "batched_tokens": "tokens of a step",
    "seqs": "sequences of a step",
    "cache_bytes": "bytes of an element of the cache",
    "weights": "GB of the memory that the weights take",
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a Python file with kernels, a folder, a wheel, or a downloaded release of vLLM such as 0.33.0",
    )
    group = parser.add_argument_group("which kernels, and how they are launched")
    flag(group, "--op TEXT", "only kernels whose path:name contains this text", default="")
    flag(group, "--kernel NAME", "only the kernel with this name", default="")
    flag(group, "--launch FILE", "descriptions of launches, TOML", type=Path)
    flag(group, "--described", "leave out kernels whose launch is not described")
    group = parser.add_argument_group("the deployment")
    text = "a preset or a TOML file; list prints the presets with their sources"
    flag(group, "--deployment FILE", text, type=str, default="")
    for name, text in _FLAGS.items():
        dest = f"given_{name}"
        flag(group, f"--{name.replace('_', '-')} N", text, type=int, dest=dest)
    command.add_share_flags(parser)


def _run(args: argparse.Namespace) -> int:
    from attnlab.horizon.deployment import SOURCES, read_deployment

    if args.deployment == "list":
        print("\n".join(f"{name:20s}{source}" for name, source in SOURCES.items()))
        return 0
    if args.source is None:
        raise InvalidCase("source must be given, but with --deployment list", field="source")
    if args.op and args.kernel:
        raise InvalidCase("op and kernel must not both be given", field="kernel")
    command.check_share_flags(args)
    if args.html is not None:
        from attnlab.reports.check_pages import check_packages

        check_packages()
    changes = {n: v for n in _FLAGS if (v := getattr(args, f"given_{n}")) is not None}
    deployment = read_deployment(args.deployment, changes) if args.deployment or changes else None
    found = _survey(args, deployment)
    if command.is_shared(args):
        from attnlab.reports.shared_page import margin_pictures

        command.share(args, found, pictures=[] if args.html is None else margin_pictures(found))
    put(found, args.json)
    return found.exit_code


def _survey(args: argparse.Namespace, deployment: "Deployment | None") -> "Survey":
    from attnlab.kernels.vllm.source import source_path

    source = source_path(args.source)
    from attnlab.horizon.launch import read_launches  # these import torch
    from attnlab.horizon.survey import survey

    launches = [] if args.launch is None else [*read_launches(args.launch).values()]
    with progress("running the kernels") as update:
        return survey(
            source,
            op=f":{args.kernel}" if args.kernel else args.op,
            deployment=deployment,
            launches=launches,
            is_assuming=not args.described,
            on_step=lambda done, total: update(done=done, total=total),
        )


COMMAND = Command(
    name="horizon",
    purpose="State the sizes at which int32 addresses of Triton kernels wrap, each proved by two runs.",
    arguments="SOURCE",
    examples=(
        "attnlab horizon 0.33.0 --op triton_decode_attention --deployment DeepSeek-V3",
        "attnlab horizon sglang-0.5.23.whl --op extend_attention --batched-tokens 262144 --html horizon.html",
        "attnlab horizon my_kernels.py --launch my_launches.toml",
    ),
    exit_codes="0 the deployment reaches no horizon, or none was given; 1 it reaches one; 3 it reaches none, "
    "but a kernel could not be run",
    add_flags=_add_flags,
    run=_run,
    notes="Nothing is allocated. A kernel whose launch is not described is run with a launch that attnlab "
    "guesses from its text; its sizes are in the table, and it is never counted as reached.",
)
