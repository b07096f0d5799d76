"""The Case, the source and the Lab that several commands take from their flags."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import ENTRY_POINT, check_plugin_file, is_plugin
from attnlab.case.flags import add_case_flags, add_source_flag, case_of
from attnlab.case.suggestion import difference
from attnlab.cli.output import notice

if TYPE_CHECKING:
    from attnlab.kernels.vllm.source import Source
    from attnlab.lab.lab import Lab


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a Case, and those of the source of its kernels."""
    group: Any = parser.add_argument_group("the vLLM whose kernels run")
    add_source_flag(group)
    add_case_flags(parser)


def case_of_flags(args: argparse.Namespace) -> Case:
    """Return the Case of the flags. If no flag names the op of a user's kernel, it is the kernel's own."""
    from_scratch = not (args.test_id or args.case or args.field_op)
    if args.field_backend is not None and is_plugin(args.field_backend) and from_scratch:
        if not ENTRY_POINT.fullmatch(args.field_backend):
            check_plugin_file(args.field_backend)
        from attnlab.kernels.plugin import PluginBackend

        args.field_op = PluginBackend(spec=args.field_backend).op
    return case_of(args)


def case_with_source(args: argparse.Namespace) -> Case:
    """Return the Case of the flags; raise InvalidCase if --source is given but not used."""
    case = case_of_flags(args)
    if args.source is not None and case.backend not in ("vllm", "rocm", "cuda"):
        raise InvalidCase(
            f"source must not be given with backend {case.backend}; add --backend vllm, rocm or cuda",
            field="source",
        )
    if args.source is not None:
        from attnlab.kernels.vllm.source import find_source

        find_source(args.source)
    return case


def notice_rules(source: "Source") -> None:
    """Print one line if a release differs in a known way from the rules that are used for it."""
    if text := difference(source.version):
        notice(f"vLLM {source.version} is run with the rules of {source.rules}{text}")


def lab_of(args: argparse.Namespace, on_step: Callable[..., None]) -> "Lab":
    """Return a Lab with the source and the device of the flags.

    Prints how the source's release differs from the rules that are used for it.
    """
    from attnlab.lab.lab import Lab

    if args.source is not None:
        from attnlab.kernels.vllm.source import find_source

        notice_rules(find_source(args.source))
    return Lab(source=args.source, device=args.device, on_step=on_step, on_notice=notice)
