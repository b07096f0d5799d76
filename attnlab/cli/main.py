"""The command line: ``attnlab run``, ``explain``, ``decode-error``, ``diagnose``, ``power``, ``claims``,
``investigate``, ``fetch`` and ``bench``.

Exit codes: 0 where everything matches, 1 where something does not, 2 for bad input, which is told in
one line. A notebook that cannot run here, for a package that it needs, is named as such and makes no 1
unless no notebook could run at all. With ``--json`` one document goes to standard output and nothing
else; progress is shown on standard error, and only to a person.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from attnlab import __version__
from attnlab.case.case import Case
from attnlab.case.declaration import field_type
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.fields import Int, is_plugin
from attnlab.case.flags import Parser, add_case_flags, add_source_flag, case_of, read_text
from attnlab.cli.check import add_check_flags, draw_findings, run_check, show_report
from attnlab.cli.investigate import add_investigate_flags, exit_code, run_investigate

_ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)
_PLACES_SHOWN = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
    except AttnLabError as error:
        print(f"attnlab: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("attnlab: interrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="attnlab",
        description="Find out why a paged-attention kernel, or the test of one, is wrong.",
        epilog="Exit codes: 0 all matches, 1 something does not, 2 bad input.",
    )
    parser.add_argument("--version", action="version", version=f"attnlab {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    run = _command(commands, "run", _run, "run one case: dispatch, violations, comparison, places")
    add_case_flags(run)
    add_source_flag(run)
    run.add_argument("--stages", action="store_true", help="run every stage and print a table")
    run.add_argument(
        "--platforms",
        metavar="A,B",
        help="the columns of --stages (gfx942,sm_90; cpu for the CPU's op)",
    )
    run.add_argument(
        "--save-call",
        type=Path,
        metavar="FILE",
        help="write the call, with the output that the kernels left, to a safetensors file",
    )

    explain = _command(
        commands, "explain", _explain, "say which kernel runs, and why not the other"
    )
    add_case_flags(explain)

    decode = _command(
        commands,
        "decode-error",
        _decode_error,
        "read an assertion's text: which sequence, token and kernel",
    )
    decode.add_argument(
        "file", nargs="?", default="-", help="the text; - is standard input (default)"
    )
    add_case_flags(decode)

    _add_conclusions(commands)

    check = _command(
        commands,
        "check",
        _check,
        "run a library of kernels over hostile cases, and report what is wrong",
    )
    add_check_flags(check)

    investigate = _command(
        commands, "investigate", _investigate, "run the notebooks headless and write reports/"
    )
    add_investigate_flags(investigate)

    fetch = _command(
        commands, "fetch", _fetch, "download a release of vLLM with pip, to be a --source"
    )
    fetch.add_argument("release", help="its version, 0.33.0 say; a wheel has 250 to 500 MB")
    fetch.add_argument(
        "--sdist", action="store_true", help="the sdist, of 10 to 50 MB: it has csrc/rocm"
    )

    bench = _command(
        commands,
        "bench",
        _bench,
        "measure speed and memory on this machine, each figure beside its yardstick",
    )
    bench.add_argument(
        "what",
        nargs="?",
        choices=("speed", "diagnose"),
        default="speed",
        help="speed and memory (default), or the diagnosis on planted defects",
    )
    bench.add_argument(
        "--source", type=Path, metavar="PATH", help="measure the interpreter on this vLLM instead"
    )
    bench.add_argument(
        "--trials",
        type=int,
        default=500,
        metavar="N",
        help="defects to plant, and sound runs (500)",
    )
    bench.add_argument(
        "--seed", type=int, default=1, metavar="N", help="what the random cases are drawn from (1)"
    )
    bench.add_argument(
        "--rocm", action="store_true", help="measure the emulated AMD device on --source instead"
    )
    return parser


def _add_conclusions(commands: Any) -> None:
    """Add the commands that conclude something."""
    diagnose = _command(
        commands, "diagnose", _diagnose, "find the defect that explains an output, or abstain"
    )
    add_case_flags(diagnose)
    add_source_flag(diagnose)
    diagnose.add_argument(
        "--output-file",
        type=Path,
        metavar="FILE",
        help="a safetensors file with the tensor 'output' to explain, instead of running the case",
    )
    diagnose.add_argument(
        "--call",
        type=Path,
        metavar="FILE",
        help="a saved KernelCall whose output is to be explained; of the case only the platform, "
        "the release and the op's rules count",
    )

    power = _command(
        commands, "power", _power, "say which defects a test would notice, and what would make it"
    )
    add_case_flags(power)

    _command(commands, "claims", _claims, "put the claims of the investigation's notes to the test")


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.set_defaults(command=function)
    return command


def _notice(text: str) -> None:
    print(f"attnlab: {text}", file=sys.stderr)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def _console() -> Console:
    return Console(highlight=False)


@contextmanager
def _progress(text: str) -> Iterator[Callable[..., None]]:
    """Show a step, or a bar with (done, total), on standard error while a person watches."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=_ERRORS, transient=True, disable=not _ERRORS.is_terminal
    ) as bar:
        task = bar.add_task(text, total=None)

        def show(
            step: str | None = None, done: int | None = None, total: int | None = None
        ) -> None:
            bar.update(task, description=step or text, completed=done, total=total)

        yield show


def _check(args: argparse.Namespace) -> int:
    report = run_check(args, _progress)
    page = draw_findings(args, report, _progress)
    if args.json:
        drawn = {} if page is None else {"pictures": str(page)}
        _print_json({**report.to_dict(), **drawn})
    else:
        show_report(_console(), report)
        if page is not None:
            print(f"pictures of the findings: {page}")
    return 1 if report.findings else 0


def _case_of(args: argparse.Namespace) -> Case:
    """Return the Case of the flags; the op of a user's kernel, if no flag names one, is the kernel's own."""
    from_scratch = not (args.test_id or args.case or args.knob_op)
    if args.knob_backend is not None and is_plugin(args.knob_backend) and from_scratch:
        from attnlab.kernels.plugin import PluginBackend

        args.knob_op = PluginBackend(spec=args.knob_backend).op
    return case_of(args)


def _case_with_source(args: argparse.Namespace) -> Case:
    """Return the Case of the flags; raise InvalidCase where its backend has no use for --source."""
    case = _case_of(args)
    if args.source is not None and case.backend not in ("vllm", "rocm"):
        raise InvalidCase(
            f"source must not be given with backend {case.backend}; add --backend vllm or rocm"
        )
    return case


def _run(args: argparse.Namespace) -> int:
    case = _case_with_source(args)
    return _run_stages(args, case) if args.stages else _run_case(args, case)


def _run_case(args: argparse.Namespace, case: Case) -> int:
    from attnlab.lab.lab import Lab
    from attnlab.show.terminal import show_result

    if args.save_call is not None and not args.save_call.absolute().parent.is_dir():
        raise InvalidCase(f"save-call must be in a folder that exists, got {args.save_call}")
    with _progress("running") as show:
        lab = Lab(source=args.source, device=args.device, on_step=show, on_notice=_notice)
        result = lab.run(case)
    if args.save_call is not None:
        result.call.save(args.save_call)
    if args.json:
        _print_json(result.to_dict(_PLACES_SHOWN))
    else:
        show_result(_console(), result)
    return 0 if result.status == "match" else 1


def _run_stages(args: argparse.Namespace, case: Case) -> int:
    from attnlab.lab.lab import Lab
    from attnlab.lab.stage_table import platforms_shown, stage_table, to_json
    from attnlab.show.terminal import show_stages

    platforms = platforms_shown(case) if args.platforms is None else args.platforms.split(",")
    for platform in platforms:
        field_type("platform").check("platforms", platform)
    with _progress("table of stages") as show:
        lab = Lab(source=args.source, device=args.device, on_step=show, on_notice=_notice)
        cells = stage_table(
            lab, case, platforms, on_cell=lambda n, total: show(done=n, total=total)
        )
    if args.json:
        _print_json(to_json(case, cells))
    else:
        show_stages(_console(), case, cells)
    return 0 if all(cell.status == "match" for cell in cells) else 1


def _explain(args: argparse.Namespace) -> int:
    from attnlab.contracts.dispatch import decide
    from attnlab.show.terminal import show_decision

    decision = decide(_case_of(args))
    if args.json:
        _print_json(decision.to_dict())
    else:
        show_decision(_console(), decision)
    return 0


def _decode_error(args: argparse.Namespace) -> int:
    from attnlab.lab.decode_error import decode_error
    from attnlab.show.terminal import show_decoded

    decoded = decode_error(read_text(args.file), case_of(args))
    if args.json:
        _print_json(decoded.to_dict())
    else:
        show_decoded(_console(), decoded)
    return 0


def _diagnose(args: argparse.Namespace) -> int:
    from attnlab.cli.terminal_diagnosis import show_diagnosis
    from attnlab.diagnosis.files import diagnose_files
    from attnlab.lab.lab import Lab

    case = _case_with_source(args)
    if args.call is not None and args.output_file is not None:
        raise InvalidCase("output-file and call must not both be given")
    with _progress("diagnosing") as show:
        lab = Lab(source=args.source, device=args.device, on_step=show, on_notice=_notice)
        told = diagnose_files(case, lab, args.output_file, args.call)
    if args.json:
        _print_json(told.to_dict())
    else:
        show_diagnosis(_console(), told)
    return 1 if told.is_wrong else 0


def _power(args: argparse.Namespace) -> int:
    from attnlab.cli.terminal_diagnosis import show_power
    from attnlab.mutation.power import power

    with _progress("planting defects") as show:
        told = power(_case_of(args), on_step=show)
    if args.json:
        _print_json(told.to_dict())
    else:
        show_power(_console(), told)
    return 0 if not told.survivors else 1


def _claims(args: argparse.Namespace) -> int:
    from attnlab.cli.terminal_diagnosis import show_claims
    from attnlab.study.claims import judge_claims

    with _progress("claims") as show:
        findings = judge_claims(on_step=show)
    if args.json:
        _print_json([finding.to_dict() for finding in findings])
    else:
        show_claims(_console(), findings)
    return 0


def _fetch(args: argparse.Namespace) -> int:
    from attnlab.kernels.vllm.sdist import fetch_sdist
    from attnlab.kernels.vllm.source import fetch, find_source

    with _progress(f"downloading vLLM {args.release}"):
        path = (fetch_sdist if args.sdist else fetch)(args.release)
        source = find_source(path)
    if args.json:
        _print_json({"version": source.version, "path": str(path), "ops": str(source.root)})
    else:
        print(path)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from attnlab.show.terminal import show_bench, show_interpreter, show_rocm

    if args.what == "diagnose":
        return _bench_diagnose(args)
    with _progress("measuring") as show:
        if args.rocm:
            from attnlab.cli.bench.rocm import bench_rocm

            figures = bench_rocm(args.source, on_step=show)
        elif args.source is not None:
            from attnlab.cli.bench.interpreter import bench_interpreter

            figures = bench_interpreter(args.source, on_step=show)
        else:
            from attnlab.cli.bench.lab import bench

            figures = bench(on_step=show)
    if args.json:
        _print_json(figures)
    elif args.rocm:
        show_rocm(_console(), figures)
    elif args.source is not None:
        show_interpreter(_console(), figures)
    else:
        show_bench(_console(), figures)
    return 0


def _bench_diagnose(args: argparse.Namespace) -> int:
    from attnlab.cli.bench.diagnosis import bench_diagnose
    from attnlab.cli.terminal_diagnosis import show_bench_diagnose

    if args.source is not None:
        raise InvalidCase("source must not be given with diagnose")
    trials, seed = Int(1).check("trials", args.trials), Int(0).check("seed", args.seed)
    with _progress("planting") as show:
        figures = bench_diagnose(trials, trials, seed, on_step=show)
    if args.json:
        _print_json(figures)
    else:
        show_bench_diagnose(_console(), figures)
    return 0


def _investigate(args: argparse.Namespace) -> int:
    from attnlab.cli.terminal_outcomes import show_outcomes

    results = run_investigate(args)
    if args.json:
        print((args.reports / "verdicts.json").read_text(encoding="utf-8"))
    else:
        show_outcomes(_console(), results, args.reports)
    return exit_code(results)
