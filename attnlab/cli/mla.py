"""The command ``attnlab mla``."""

import argparse
from collections.abc import Sequence
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.case.flags import given_fields
from attnlab.case.ops import RELEASES
from attnlab.case.output_file import check_output_file, write_text
from attnlab.cli.command import check_share_flags, print_json, progress, put, runs, share, show
from attnlab.library.op import package_of
from attnlab.linear.state_case import STATE_FIELDS, STATE_OPS, StateCase, plain_fields
from attnlab.mla.mla_case import MLA_BACKENDS, MLA_FIELDS, MlaCase


def _check_runner(args: argparse.Namespace, backends: Sequence[str]) -> None:
    """Raise InvalidCase for a backend that is none of some, or a source without vLLM."""
    if args.backend not in backends:
        refuse("backend", f"one of {', '.join(backends)}", args.backend)
    if args.source is not None:
        from attnlab.kernels.vllm.source import find_source

        find_source(args.source)


@runs("mla", fields=MLA_FIELDS)
def _mla(args: argparse.Namespace) -> int:
    fields = given_fields(args, MLA_FIELDS)
    _check_runner(args, MLA_BACKENDS)
    if args.faults:
        from attnlab.mla.faults import MLA_FAULTS

        faults = {
            name: {"text": one.text, "paths": list(one.paths), "reported_in": list(one.seen_in)}
            for name, one in MLA_FAULTS.items()
        }
        return _list_faults(faults, args.json)
    where: dict[str, Any] = {"backend": args.backend, "source": args.source, "device": args.device}
    if args.hostile:
        if args.fault is not None or set(fields) - {"release"}:
            raise InvalidCase("hostile takes no fault and no field but release", field="hostile")
        release = fields.get("release", RELEASES[-1])
        if release not in RELEASES:
            refuse("release", f"one of {', '.join(RELEASES)}", release)
        from attnlab.mla.run import check_mla

        with progress("hostile cases of MLA") as on_step:
            report = check_mla(
                release,
                **where,
                on_case=lambda done, total: on_step("hostile cases of MLA", done, total),
            )
        put(report, args.json)
        return 1 if report.findings else 3 if report.unavailable else 0
    case = MlaCase(**fields)

    from attnlab.mla.run import run_mla

    result = run_mla(case, **where, fault=args.fault)
    put(result, args.json)
    return 0 if result.status == "match" else 1


def _list_faults(faults: dict[str, dict[str, Any]], as_json: bool) -> int:
    if as_json:
        print_json(faults)
        return 0
    from attnlab.cli.catalogue import list_sheet

    show(list_sheet("fault", faults, ("text", "paths")))
    return 0


@runs("writes")
def _writes(args: argparse.Namespace) -> int:
    _check_runner(args, ("vllm", "model"))

    from attnlab.lab.writes import check_writes

    report = check_writes(backend=args.backend, source=args.source)
    put(report, args.json)
    return 1 if report.findings else 3 if report.unavailable else 0


@runs("linear", fields=STATE_FIELDS)
def _run(args: argparse.Namespace) -> int:
    given: dict[str, Any] = given_fields(args, STATE_FIELDS)
    op = given.get("op", STATE_FIELDS["op"].default)
    if op not in STATE_OPS:
        refuse("op", f"one of {', '.join(STATE_OPS)}", op)
    case = StateCase(**{**plain_fields(STATE_OPS[op]), **given})
    check_share_flags(args)
    if args.script is not None:
        check_output_file(args.script, "script")

    from attnlab.kernels.vllm.source import find_source, source_path
    from attnlab.linear.state_check import xray_state

    package = package_of(case.record.library)
    source = None if args.source is None else source_path(args.source, package)
    with progress(f"{case.op}: the case, and others with it") as _:
        found = xray_state(case, source)
    if args.script is not None or args.html is not None:
        from attnlab.reports.upstream import state_script

        script = state_script(case, find_source(source, package), found.sentences[0])
        if args.script is not None:
            write_text(args.script, script)
        share(args, found, script=(script, ""))
    else:
        share(args, found)
    put(found, args.json)
    return 0 if found.status == "right" else 1
