"""The command ``attnlab mla``."""

import argparse
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.case.flags import add_field_flags, flag, given_fields
from attnlab.case.ops import RELEASES
from attnlab.case.output_file import check_output_file, write_text
from attnlab.cli.command import (
    Command,
    add_share_flags,
    check_share_flags,
    print_json,
    progress,
    put,
    share,
    show,
)
from attnlab.library.op import package_of
from attnlab.linear.state_case import STATE_FIELDS, STATE_OPS, StateCase, plain_fields
from attnlab.mla.mla_case import MLA_BACKENDS, MLA_FIELDS, MlaCase


def _add_mla_flags(parser: argparse.ArgumentParser) -> None:
    flag(
        parser, "--backend BACKEND", "model (default), or vllm: vLLM's Triton ops", default="model"
    )
    flag(parser, "--source PATH", "a wheel, an sdist or a checkout of vLLM")
    flag(parser, "--device", "where backend vllm runs", choices=("cpu", "cuda"))
    flag(parser, "--fault NAME", "plant a fault; --faults lists them")
    flag(parser, "--faults", "list the faults that have a name")
    flag(parser, "--hostile", "run all hostile cases of --release")
    add_field_flags(parser, MLA_FIELDS)


def _mla(args: argparse.Namespace) -> int:
    fields = given_fields(args, MLA_FIELDS)
    if args.backend not in MLA_BACKENDS:
        refuse("backend", f"one of {', '.join(MLA_BACKENDS)}", args.backend)
    if args.source is not None:
        from attnlab.kernels.vllm.source import find_source

        find_source(args.source)
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


MLA_COMMAND = Command(
    name="mla",
    purpose="Run a path of MLA attention step by step, and name the fault that explains a wrong output.",
    examples=(
        "attnlab mla --query-lens 5,3 --ctx-lens 70,0",
        "attnlab mla --path decode --query-lens 3,3 --ctx-lens 40,9 --fault rows_share_length",
        "attnlab mla --hostile --backend vllm --source vllm-0.33.0.whl",
    ),
    exit_codes="0 every output is within its bound; 1 one is not; 3 none is wrong, but a case could not run",
    add_flags=_add_mla_flags,
    run=_mla,
)


# The command ``attnlab writes``.

_BACKENDS = ("vllm", "model")


def _add_writes_flags(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--backend BACKEND", "vllm (default): vLLM's own ops; or model", default="vllm")
    flag(
        parser,
        "--source PATH",
        "a wheel, an sdist or a checkout of vLLM; CUDA ops need an sdist or a checkout",
    )


def _writes(args: argparse.Namespace) -> int:
    if args.backend not in _BACKENDS:
        refuse("backend", f"one of {', '.join(_BACKENDS)}", args.backend)
    if args.source is not None:
        from attnlab.kernels.vllm.source import find_source

        find_source(args.source)

    from attnlab.lab.writes import check_writes

    report = check_writes(backend=args.backend, source=args.source)
    put(report, args.json)
    return 1 if report.findings else 3 if report.unavailable else 0


WRITES_COMMAND = Command(
    name="writes",
    purpose="Check the bytes that cache writes store in further formats, and that they change no others.",
    examples=(
        "attnlab writes --backend model",
        "attnlab writes --source vllm-0.33.0.tar.gz --json",
    ),
    exit_codes="0 every write is right; 1 one is not; 3 none is wrong, but one could not run",
    add_flags=_add_writes_flags,
    run=_writes,
    notes="Formats: a scale per token and head with int8, FP8 or INT4; diffkv; and those of CUDA ops, "
    "whose csrc/cache_kernels.cu is compiled for an emulated device: mla, fp8_ds_mla, nhd, hnd, x-split.",
)


# The command ``attnlab linear``.


def _add_flags(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--source PATH", "the library of the op: a wheel, an sdist or a checkout")
    flag(parser, "--script FILE", "write a script that repeats the call without attnlab")
    add_share_flags(parser)
    add_field_flags(parser, STATE_FIELDS)


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


LINEAR_COMMAND = Command(
    name="linear",
    purpose="Run an op of linear attention, measure the weights of tokens and states, and say what is wrong.",
    examples=(
        "attnlab linear --op fla_chunk_gated_delta_rule --source fla_core-0.6.0.whl --query-lens 70,3",
        "attnlab linear --op vllm_chunk_kda --source vllm-0.33.0.whl --html page.html --script repro.py",
        "attnlab linear --op vllm_fused_recurrent_gated_delta_rule --source vllm-0.33.0.whl --query-lens 1,1",
    ),
    exit_codes="0 outputs and states are right; 1 they are not",
    add_flags=_add_flags,
    run=_run,
    notes="attnlab check --library fla (or vllm_linear) --source PATH runs the hostile cases of all ops.",
)
