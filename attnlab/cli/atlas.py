"""The command ``attnlab atlas``."""

import argparse
import re
from pathlib import Path

from attnlab.case.fields import refuse
from attnlab.case.flags import flag
from attnlab.case.output_file import make_output_folder
from attnlab.cli.check import step_text
from attnlab.cli.command import Command, notice, progress
from attnlab.cli.releases import CODES, add_page, check_page, ops_of_releases, print_table
from attnlab.cli.sharded import add_scaling
from attnlab.library.op import libraries, ops_of, package_of
from attnlab.tasks.interrupts import interruptible

_DOCUMENT = """\
--json prints the document of attnlab releases. A fault also has
  family: what the page lists it under
  runs: list of {op, state, releases, text, command, lines}, without what is empty: what its call did in
    each op; text: what is wrong, or why there is no verdict"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "releases",
        nargs="+",
        metavar="LIBRARY:RELEASES",
        help="the releases of a library: FIRST..LAST or one of the package index, or the path of a wheel, an "
        "sdist or a checkout",
    )
    how = parser.add_argument_group("how to check them")
    flag(
        how,
        "--faults FILE.json",
        "also run the calls of these faults: a document of check, releases or atlas; repeatable",
        action="append",
        type=Path,
    )
    flag(how, "--seconds SECONDS", "start no further call after this time", type=float)
    flag(
        how,
        "--case-seconds SECONDS",
        "stop a call that takes more processor time (default: 60)",
        type=float,
    )
    add_scaling(parser.add_argument_group("where to run it"))
    files = parser.add_argument_group("files to write")
    add_page(files)
    flag(
        files,
        "--report FOLDER",
        "for each fault of a library's newest release, the text of an issue and a script that needs no "
        "attnlab",
    )


def _run(args: argparse.Namespace) -> int:
    check_page(args)
    from attnlab.checker.check import check_conditions, check_scaling

    check_conditions(platform=None, seconds=args.seconds, case_seconds=args.case_seconds)
    check_scaling(engine=args.engine, shard=args.shard, times=args.times)
    if args.report is not None:
        make_output_folder(args.report, "report")
    found = [_sources(text) for text in args.releases]
    if args.out is not None:
        from attnlab.tasks.store import check_can_store

        check_can_store(args.out)

    from attnlab.checker.atlas import atlas_plan, check_atlas, read_faults
    from attnlab.checker.releases import releases_of
    from attnlab.tasks.run import find_engine
    from attnlab.tasks.store import Shard

    faults = {f: line for path in args.faults or () for f, line in read_faults(path).items()}
    shard = Shard.parse(args.shard)
    releases = [one for library, paths in found for one in releases_of(paths, "cpu", library)]
    with progress("choosing the calls"):
        plan = atlas_plan(
            releases,
            faults=faults,
            case_seconds=args.case_seconds,
            times=args.times,
        )
    title = f"checking {len(plan.releases)} releases"
    with (
        interruptible() as stop,
        progress(title) as on_step,
        find_engine(args.engine or "local", "cpu", stop) as engine,
    ):
        table = check_atlas(
            plan,
            engine,
            shard=shard,
            out=args.out,
            seconds=args.seconds,
            on_progress=lambda one: on_step(step_text(title, one), one.done, one.total),
            stop=stop,
        )
    if stop():
        notice("interrupted; the table has what ran")
    if args.report is not None:
        from attnlab.checker.atlas import newest_findings
        from attnlab.reports.upstream import write_reports

        backends = {one.version: one.backend for one in releases}
        for version, findings in newest_findings(table).items():
            backend = backends[version]
            folder = args.report / version.partition(" ")[0]
            write_reports(findings, folder, backend.version, "cpu", backend)
    print_table(args, table)
    return stop.exit_code or table.exit_code


def _sources(text: str) -> tuple[str, dict[str, Path]]:
    """Return a library and the paths of its releases, by name and version, of LIBRARY:RELEASES."""
    library, colon, releases = text.partition(":")
    known = [one for one in libraries() if ops_of(one)]
    if not colon or library not in known:
        refuse("releases", f"LIBRARY:RELEASES with a library of {', '.join(known)}", text)
    package = package_of(library)
    if re.fullmatch(r"\d+\.\d+[\w.]*", releases):
        paths = ops_of_releases(releases, package)
    else:
        from attnlab.kernels.vllm.source import find_source

        if not Path(releases).expanduser().exists():
            refuse("releases", f"{library}:FIRST..LAST, a version or a path that exists", text)
        path = Path(releases).expanduser()
        version = find_source(path, package).version
        paths = {path.name if version == "unknown" else version: path}
    return library, {f"{library} {version}": path for version, path in paths.items()}


COMMAND = Command(
    name="atlas",
    purpose="Run one small call of every known fault in releases of several libraries: who has which?",
    arguments="LIBRARY:RELEASES…",
    examples=(
        "attnlab atlas vllm:0.32.0..0.33.0 --out store --page atlas.html",
        "attnlab atlas vllm:0.33.0 sglang:0.5.15..0.5.23 aiter:path/to/aiter --report reports",
    ),
    exit_codes=CODES,
    add_flags=_add_flags,
    run=_run,
    notes=_DOCUMENT,
)
