"""The command ``attnlab compare``."""

import argparse
from typing import Any

from attnlab.case.declaration import field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Int, is_plugin
from attnlab.case.flags import flag
from attnlab.case.ops import OPS
from attnlab.case.platforms import machine_platform
from attnlab.cli import command
from attnlab.cli.command import Command, progress, put

_COUNT = Int(1, 10_000)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "kernel", metavar="KERNEL", help="your kernel, FILE.py:FUNCTION or MODULE:FUNCTION"
    )
    flag(
        group,
        "--source PATH",
        "the other side, a vLLM: a wheel, an sdist, a checkout, or a version that attnlab fetch downloaded",
        type=str,
    )
    flag(
        group,
        "--against KERNEL",
        "the other side: another kernel of yours, or a backend such as vllm",
    )
    flag(group, "--random N", "how many random cases (default: %(default)s)", default="20")
    flag(group, "--seed N", "of the random numbers (default: %(default)s)", default="0")
    flag(group, "--op OP", "the op of the cases (default: that of your kernel)")
    flag(group, "--platform PLATFORM", "whose rules apply (default: this machine's GPU, or sm_90)")
    flag(group, "--device", "where vLLM's kernels run (default: cuda if torch can use it)",
         choices=("cpu", "cuda"))  # fmt: skip
    command.add_share_flags(parser)


def _run(args: argparse.Namespace) -> int:
    command.check_share_flags(args)
    count = _COUNT.check("random", _COUNT.parse("random", args.random))
    seed = Int(0, 1 << 30).check("seed", Int(0, 1 << 30).parse("seed", args.seed))
    if not is_plugin(args.kernel):
        text = f"kernel must be FILE.py:FUNCTION or MODULE:FUNCTION, got {args.kernel!r}"
        raise InvalidCase(text, field="kernel")
    if args.op is not None and args.op not in OPS:
        raise InvalidCase(f"op must be one of {', '.join(OPS)}, got {args.op!r}", field="op")
    if (args.source is None) == (args.against is None):
        raise InvalidCase("source or against must be given, and not both", field="source")
    platform = args.platform or machine_platform() or "sm_90"
    field_type("platform").check("platform", platform)

    from attnlab.kernels.runner import runners
    from attnlab.replay.random_comparison import compare_backends

    (mine,) = runners([], [args.kernel], None)
    sources, backends = ([], [args.against]) if args.source is None else ([args.source], [])
    (other,) = runners(sources, backends, args.device)
    first = mine.find()
    with progress("comparing") as on_step:
        found = compare_backends(
            (first, other.find()),
            (args.kernel, other.name if args.source is None else f"vLLM {other.name}"),
            op=args.op or first.ops[0],
            platform=platform,
            count=count,
            seed=seed,
            on_case=lambda done: on_step("comparing", done, count),
        )
    pictures: tuple[Any, ...] = ()
    if args.html is not None:
        from attnlab.reports.shared_page import comparison_pictures

        pictures = comparison_pictures(found.names, found.marks())
    command.share(args, found, pictures=pictures)
    put(found, args.json)
    return found.exit_code


COMMAND = Command(
    name="compare",
    purpose="Run your kernel and another one on random cases, and say which of them is wrong.",
    arguments="KERNEL",
    examples=(
        "attnlab compare mine.py:my_attention --source vllm-0.33.0.whl --random 20",
        "attnlab compare mine.py:my_attention --against vllm",
    ),
    exit_codes="0 both are right in every case; 1 one is wrong in a case; 3 no case ran on both",
    add_flags=_add_flags,
    run=_run,
    used=("--source", "--random", "--against", "--seed"),
    notes="Each output is compared with attention in float64; a difference counts if rounding does not "
    "explain it. A case that one of both does not support is replaced.",
)
