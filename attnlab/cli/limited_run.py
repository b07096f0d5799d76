"""Run a Case in a child process, with a limit for the time that its kernels take."""

import argparse
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.cli.output import notice, print_json
from attnlab.kernels.child_process import run_in_child, start_context

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
    return _rejected(args, case, text)


def _rejected(args: argparse.Namespace, case: Case, text: str) -> int:
    """Print that the call was rejected."""
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
