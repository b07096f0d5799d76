"""The command ``attnlab run``."""

import argparse
import dataclasses
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.fields import Int, Number, is_plugin, refuse, suggestion
from attnlab.case.flags import case_of, given_fields, notebook_parameters, read_text
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import OPS
from attnlab.case.output_file import check_output_file
from attnlab.case.platforms import machine_platform
from attnlab.cli import command
from attnlab.cli.command import case_of_flags, notice, print_json, progress, put, runs, show
from attnlab.kernels.child_process import run_in_child, start_context
from attnlab.lab.products import check_memory

_POLL_S = 0.1
_KERNELS = "kernels"  # the step of a Lab that has the limit
Work = Callable[[argparse.Namespace, Case, Callable[..., None]], int]


def run_limited(work: Work, args: argparse.Namespace, case: Case, seconds: float) -> int:
    """Return the exit code of ``work(args, case, on_step)``, which runs in a child process.

    If the kernels take longer than ``seconds``, or end the process, the call counts as rejected: the
    exit code is 1. Raises the AttnLabError and OSError that ``work`` raises.
    """
    context = start_context()
    receiver, sender = context.Pipe(duplex=False)
    job = pickle.dumps((_work, (work, args, case)))
    process = context.Process(target=run_in_child, args=(job, sender))
    process.start()
    sender.close()
    deadline = None
    try:
        while deadline is None or time.monotonic() < deadline:
            if not receiver.poll(_POLL_S):
                continue
            message = receiver.recv()
            if isinstance(message, int):
                process.join()
                return message
            if isinstance(message, Exception):
                raise message
            deadline = time.monotonic() + seconds if message == _KERNELS else None
        text = f"the kernel did not end within {seconds:g} s"
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        text = f"the kernel ended its process {how}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if args.json:
        print_json({"status": "rejected", "error": text, "run": case.to_cli()})
    else:
        notice(f"rejected: {text}")
    return 1


def _work(sender: Any, work: Work, args: argparse.Namespace, case: Case) -> None:
    """Run in the child: send each new step, then the exit code or the error."""
    steps: list[str] = []

    def on_step(step: str | None = None, done: int | None = None, total: int | None = None) -> None:
        if step is not None and steps[-1:] != [step]:
            steps.append(step)
            sender.send(step)

    try:
        code = work(args, case, on_step)
    except (AttnLabError, OSError) as error:
        sender.send(error)
    else:
        sender.send(code)


@runs("explain")
def _explain(args: argparse.Namespace) -> int:
    from attnlab.contracts.dispatch import decide

    decision = decide(case_of_flags(args))
    put(decision, args.json)
    return 0


@runs("decode-error")
def _decode_error(args: argparse.Namespace) -> int:
    from attnlab.lab.decode_error import ErrorText  # imports no torch

    command.check_share_flags(args)
    found = ErrorText.read(read_text(args.file))
    if args.test_id is None and args.case is None:
        args.test_id = found.test_id
    else:  # the Case is given: an id in the text does not matter
        found = dataclasses.replace(found, test_id=args.test_id, refusal="")
    case, platform_by = command.with_platform(args, case_of(args))

    from attnlab.lab.decode_error import decode

    decoded = decode(found, case, platform_by=platform_by)
    command.share(args, decoded, draw=lambda pages: pages.text_pictures(decoded, case))
    put(decoded, args.json, args.assumed)
    return 0


_MOST_PLACES = 200  # in the JSON document


# A Case without flags has the size of the test, which takes 10 to 50 s; this one takes less than 1 s.
_NOT_OF_SIZE = {"platform", "release", "stage", "backend"}


@runs("run")
def _run_case(args: argparse.Namespace) -> int:
    case = command.case_with_runner(args)
    if args.save_call is not None:
        _check_save_call(args, case)
    if args.platforms is not None and not args.stages:
        raise InvalidCase("platforms must be given with --stages")
    if args.seconds is not None and args.stages:
        raise InvalidCase("seconds must not be given with stages")
    if args.against and args.stages:
        raise InvalidCase("against must not be given with stages")
    args.against = _changes(args.against or ())
    platforms = [] if args.platforms is None else args.platforms.split(",")
    for platform in platforms:
        field_type("platform").check("platforms", platform)
    if args.seconds is not None:
        args.seconds = Number().check("seconds", Number().parse("seconds", args.seconds))
    case = _reduced(args, case)
    check_memory(case)
    if args.stages:
        return _run_stages(args, case, platforms)
    if args.seconds is not None:
        return run_limited(_run_run_case, args, case, args.seconds)
    with progress("running") as on_step:
        return _run_run_case(args, case, on_step)


def _check_save_call(args: argparse.Namespace, case: Case) -> None:
    """Raise InvalidCase if the call of a Case cannot be saved, before minutes are spent."""
    if args.stages:
        raise InvalidCase("save-call must not be given with stages")
    if case.op_argument != NONE:
        refuse("save-call", f"given without op_argument {case.op_argument}", str(args.save_call))
    check_output_file(args.save_call, "save-call")


def _reduced(args: argparse.Namespace, case: Case) -> Case:
    """Return the Case, or a smaller one if no flag says what to run."""
    if args.full or args.test_id or args.case or given_fields(args, FIELDS).keys() - _NOT_OF_SIZE:
        return case
    notice("reduced to 8 heads and lengths up to 128; --full runs the size of the test")
    return case.reduced()


def _changes(words: Sequence[str]) -> dict[str, Any]:
    """Return FIELD=VALUE words as changes of a Case; raise InvalidCase."""
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals:
            raise InvalidCase(f"against must be FIELD=VALUE, got {word!r}")
        if name not in FIELDS:
            hint = suggestion(name, FIELDS)
            raise InvalidCase(f"against must name a field of a Case, got {name!r}{hint}")
    return notebook_parameters(words)


def _run_run_case(args: argparse.Namespace, case: Case, on_step: Callable[..., None]) -> int:
    """Run the Case and print its Result; return the exit code."""
    from attnlab.diagnosis.diagnosis import run_again

    lab = command.lab_of(args, on_step)
    result = lab.run(case)
    if args.save_call is not None:
        result.recorded_call.save(args.save_call)
    other = None
    if args.against and result.error is None:
        other = run_again(lab, case, result.output, args.against)
    if args.json:
        document = result.to_dict(_MOST_PLACES)
        print_json(document if other is None else {**document, "against": other.to_dict()})
    else:
        show(result, args.assumed)
        if other is not None:
            show(other)
    return 0 if result.status == "match" and (other is None or other.is_equal) else 1


def _run_stages(args: argparse.Namespace, case: Case, platforms: Sequence[str]) -> int:
    from attnlab.lab.lab import platforms_shown, stage_table, to_json

    platforms = platforms or platforms_shown(case)
    with progress("running the stages") as on_step:
        cells = stage_table(
            command.lab_of(args, on_step),
            case,
            platforms,
            on_cell=lambda done, total: on_step(done=done, total=total),
        )
    if args.json:
        print_json(to_json(case, cells))
    else:
        show(cells)
    return 0 if all(cell.status == "match" for cell in cells) else 1


_COUNT = Int(1, 10_000)


@runs("compare")
def _run(args: argparse.Namespace) -> int:
    command.check_share_flags(args)
    count = _COUNT.check("random", _COUNT.parse("random", args.random))
    seed = Int(0, 1 << 30).check("seed", Int(0, 1 << 30).parse("seed", args.seed))
    if not is_plugin(args.kernel):
        text = f"kernel must be FILE.py:FUNCTION or MODULE:FUNCTION, got {args.kernel!r}"
        raise InvalidCase(text)
    if args.op is not None and args.op not in OPS:
        raise InvalidCase(f"op must be one of {', '.join(OPS)}, got {args.op!r}")
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
    command.share(
        args, found, draw=lambda pages: pages.comparison_pictures(found.names, found.marks())
    )
    put(found, args.json)
    return found.exit_code
