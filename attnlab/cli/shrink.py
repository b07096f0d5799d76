"""The command ``attnlab shrink``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Number, refuse
from attnlab.case.output_file import check_output_file, write_text
from attnlab.cli.command import Command
from attnlab.cli.output import print_json, progress, show
from attnlab.cli.replay import add_call_flags, read_given

if TYPE_CHECKING:
    from attnlab.kernels.backend import Backend
    from attnlab.replay.shrinking import Shrunk


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_call_flags(parser, several=False)
    group = parser.add_argument_group("the result")
    group.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the file of the smaller call; its script, if there is one, has the same name with .py "
        "(default: CALL-small.safetensors in the current folder)",
    )
    group.add_argument(
        "--seconds", metavar="S", help="run no further call after this time (default: 120)"
    )


def _run(args: argparse.Namespace) -> int:
    seconds = Number().check("seconds", Number().parse("seconds", args.seconds or "120"))
    if not seconds > 0:
        raise InvalidCase(f"seconds must be positive, got {seconds:g}", field="seconds")
    out = args.out or Path(f"{args.call.stem}-small.safetensors")
    if out.suffix == ".py":
        refuse("out", "a file that does not end with .py, which is the script's name", str(out))
    check_output_file(out, "out")
    call, case, given = read_given(args)

    from attnlab.replay.public import one_backend
    from attnlab.replay.shrinking import Judge, shrink

    backend = one_backend(args.source, args.backend, args.device)
    judge = Judge(backend=backend, case=case, given=given)
    with progress("shrinking") as on_step:
        found = shrink(
            call,
            judge,
            seconds=seconds,
            on_try=lambda step, tries: on_step(f"shrinking, run {tries + 1}: {step}"),
        )
    files, why = _write(found, out, backend, judge.case) if found.is_failing else ([], "")
    if args.json:
        print_json({**found.to_dict(), "files": files, "no_script": why})
    else:
        show(found)
        for line in (
            *(f"written: {file}" for file in files),
            *([f"no script: {why}"] if why else []),
        ):
            print(line)
    return 0 if found.status == "match" else 1


def _write(
    found: "Shrunk", out: Path, backend: "Backend | None", case: Case
) -> tuple[list[str], str]:
    """Write the call and its script; return the files, and why there is no script, or ""."""
    from attnlab.contracts.target import Target
    from attnlab.replay.run_call import where_to_run
    from attnlab.reports.call_script import call_script, why_no_script

    found.call.save(out)
    if backend is None or backend.name != "vllm":
        return [str(out)], "a script calls the ops of a vLLM, and --source names none"
    why = why_no_script(found.call)
    if why:
        return [str(out)], why
    text = call_script(
        found.call,
        Target.of(where_to_run(found.call, backend, case, ())),
        version=backend.version,
        device=backend.device,
        evidence=found.sentences()[0],
    )
    if not text:
        return [str(out)], "the tensors of the call are too large"
    script = out.with_suffix(".py")
    write_text(script, text)
    return [str(out), str(script)], ""


COMMAND = Command(
    name="shrink",
    purpose="Find the smallest call that still fails, and write it.",
    arguments="CALL",
    examples=(
        "attnlab shrink call.safetensors --source vllm-0.33.0.whl",
        "attnlab shrink call.safetensors --backend mine.py:my_attention --seconds 30",
    ),
    exit_codes="0 the call does not fail; 1 it fails, and the smaller one is written, or equal runs of it\n"
    "  differ",
    notes="With --source, or --backend vllm, a script is written, too, that reproduces the fault with torch, "
    "Triton and vLLM alone. Other backends have none, and some calls do not; the command states why.",
    add_flags=_add_flags,
    run=_run,
)
