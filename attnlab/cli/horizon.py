"""The command ``attnlab horizon``."""

import argparse
import shlex
import sys
from pathlib import Path

from attnlab.case.errors import InvalidCase
from attnlab.case.output_file import HTML, check_output_file
from attnlab.cli.command import Command, progress, put

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
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="a Python file with kernels, a folder, a wheel, or a downloaded release of vLLM such as 0.33.0",
    )
    parser.add_argument(
        "--op", default="", metavar="TEXT", help="only kernels whose path:name contains this text"
    )
    parser.add_argument(
        "--kernel", default="", metavar="NAME", help="only the kernel with this name"
    )
    parser.add_argument(
        "--launch", type=Path, metavar="FILE", help="descriptions of launches, TOML"
    )
    parser.add_argument(
        "--described", action="store_true", help="leave out kernels whose launch is not described"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="a page with the table and a plot for each kernel"
    )
    group = parser.add_argument_group("the deployment")
    group.add_argument(
        "--deployment",
        default="",
        metavar="FILE",
        help="a preset (--deployment list prints them) or a TOML file",
    )
    for name, text in _FLAGS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}", type=int, dest=f"given_{name}", metavar="N", help=text
        )


def _run(args: argparse.Namespace) -> int:
    if args.html is not None:
        check_output_file(args.html, "html", HTML)

    if args.op and args.kernel:
        raise InvalidCase("op and kernel must not both be given", field="kernel")
    from attnlab.horizon.deployment import PRESETS, read_deployment
    from attnlab.kernels.vllm.source import source_path

    if args.deployment == "list":
        print("\n".join(PRESETS))
        return 0
    source = source_path(str(args.source))
    changes = {n: v for n in _FLAGS if (v := getattr(args, f"given_{n}")) is not None}
    deployment = read_deployment(args.deployment, changes) if args.deployment or changes else None

    from attnlab.horizon.launch import read_launches
    from attnlab.horizon.survey import survey

    launches = [] if args.launch is None else [*read_launches(args.launch).values()]
    with progress("running the kernels") as update:
        found = survey(
            source,
            op=f":{args.kernel}" if args.kernel else args.op,
            deployment=deployment,
            launches=launches,
            is_assuming=not args.described,
            on_step=lambda done, total: update(done=done, total=total),
        )
    if args.html is not None:
        from attnlab.horizon.page import write_survey

        write_survey(args.html, found, shlex.join(["attnlab", "horizon", *sys.argv[2:]]))
    put(found, args.json)
    return found.exit_code


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
