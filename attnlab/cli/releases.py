"""The command ``attnlab releases``."""

import argparse
import json
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.fields import refuse
from attnlab.case.flags import flag
from attnlab.case.output_file import HTML, check_output_file, make_output_folder, write_text
from attnlab.cli.check import add_conditions, check_run_flags, step_text
from attnlab.cli.command import Command, add_library, notice, print_json, progress, show
from attnlab.cli.sharded import add_scaling
from attnlab.library.op import Package, libraries, ops_of, package_of
from attnlab.tasks.run import interruptible

if TYPE_CHECKING:
    from attnlab.checker.releases import ReleaseTable
    from attnlab.tasks.task import Engine, Stop

CODES = (
    "0 all cases ran, without faults; 1 faults;\n  3 no faults, but cases did not run; 128 + n stopped by "
    "signal n"
)
_ARCHIVES = (".whl", ".tar.gz", ".zip")
_DOCUMENT = """\
--json prints one object:
  releases, device, platform, cases, cases_run, seconds, versions
  ops: {release: {op: the release whose identical op ran}}; an absent op is left out
  faults: list of {op, kind, diagnosis, names, description, native, native_runs, first, last,
    cells: {release: state}, evidence, case, run}; native: yes, no, not confirmed, not runnable
    or not tried; native_runs: {release: {is_confirmed, why}}
  states: the meaning of each state
  not_run, left_out: lists of {op, reason, cases, run}; op has the release before it; left_out: what an op
    does not support, or what violates its contract"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "releases",
        nargs="?",
        metavar="FIRST..LAST",
        help="the releases of the package index from FIRST to LAST, or one release; with --sources the "
        "default is all of the folder",
    )
    flag(
        parser,
        "--sources DIR",
        "take the releases from this folder, which has a wheel, an sdist or a folder for each, and "
        "download nothing",
    )
    flag(
        parser,
        "--op OP",
        "check this op; repeatable (default: all)",
        action="append",
    )
    add_library(parser)
    add_conditions(parser.add_argument_group("how to check them"))
    place = parser.add_argument_group("where to run it")
    add_scaling(place)
    flag(
        place,
        "--native",
        "with device cpu: run the smallest case of each fault on this machine's GPU, too, and state "
        "whether it confirms the fault",
    )
    add_page(parser.add_argument_group("files to write"))


def add_page(group: Any) -> None:
    """Add --page."""
    flag(
        group,
        "--page FILE.html",
        "write the table as one HTML page, and the JSON document next to it",
    )


def _run(args: argparse.Namespace) -> int:
    check_page(args)
    check_run_flags(args)
    if args.native and args.device != "cpu":
        refuse("device", "cpu with native", args.device)
    if args.library != "vllm" and (args.native or args.device != "cpu"):
        refuse("library", "vllm with native or device cuda", args.library)
    found = _of_folder(args) if args.sources is not None else _of_index(args)
    if args.out is not None:
        from attnlab.tasks.store import check_can_store

        check_can_store(args.out)

    from attnlab.checker.check import release_plan
    from attnlab.checker.releases import check_releases, releases_of
    from attnlab.tasks.run import find_engine
    from attnlab.tasks.store import Shard

    shard = Shard.parse(args.shard)
    plan = release_plan(
        releases_of(found, args.device, args.library),
        ops=args.op,
        platform=args.platform,
        cases=args.cases,
        case_seconds=args.case_seconds,
        seed=args.seed,
        times=args.times,
        horizon=not args.no_horizon,
    )
    title = f"checking {len(plan.releases)} releases"
    with (
        interruptible() as stop,
        progress(title) as on_step,
        find_engine(args.engine or "local", args.device, stop) as engine,
        _gpu(args.native, args.engine, stop) as native,
    ):
        table = check_releases(
            plan,
            engine,
            native=native,
            shard=shard,
            out=args.out,
            seconds=args.seconds,
            on_progress=lambda one: on_step(step_text(title, one), one.done, one.total),
            stop=stop,
        )
    if stop():
        notice("interrupted; the table has what ran")
    print_table(args, table)
    return stop.exit_code or table.exit_code


def _gpu(
    is_wanted: bool, engine: str | None, stop: "Stop"
) -> "AbstractContextManager[Engine | None]":
    """Return the engine of this machine's GPUs, if it is wanted, with as many workers as a local engine.

    Raises Unavailable if there is no GPU.
    """
    if not is_wanted:
        return nullcontext()
    import torch

    from attnlab.tasks.run import find_engine

    if not torch.cuda.is_available():
        raise Unavailable("native needs a GPU that torch can use")
    is_local = engine is not None and engine.startswith("local")
    return find_engine(engine if engine and is_local else "local", "cuda", stop)


def check_page(args: argparse.Namespace) -> None:
    """Raise InvalidCase if the page or its JSON cannot be written, before anything runs."""
    if args.page is None:
        return
    check_output_file(args.page, "page", HTML)
    check_output_file(args.page.with_suffix(".json"), "page")


def print_table(args: argparse.Namespace, table: "ReleaseTable") -> None:
    """Print the table, and write its page and JSON if --page is given."""
    from attnlab.case.shown import json_value

    if args.page is not None:
        from attnlab.reports.check_pages import write_releases

        write_releases(args.page, table)
        document = json.dumps(json_value(table.to_dict()), indent=1, allow_nan=False)
        write_text(args.page.with_suffix(".json"), document + "\n")
    if args.json:
        print_json(table.to_dict())
        return
    show(table)
    if args.page is not None:
        print(f"page: {args.page}")
    if table.not_run:
        count = sum(entry.cases for entry in table.not_run)
        print(f"not run: {count} of {table.cases} cases")


def _of_index(args: argparse.Namespace) -> dict[str, Path]:
    """Return the folders of the releases of the package index."""
    if args.releases is None:
        raise InvalidCase(
            "releases must be FIRST..LAST, or --sources must be given", field="releases"
        )
    return ops_of_releases(args.releases, package_of(args.library))


def ops_of_releases(text: str, package: Package) -> dict[str, Path]:
    """Return the folders of the releases FIRST..LAST, or of one, the oldest first; download their ops."""
    from attnlab.kernels.vllm.source import fetch_ops, releases_between

    first, last = _ends(text)
    versions = releases_between(first, last, package)
    found = {}
    with progress("downloading the ops") as on_step:
        for i, version in enumerate(versions):
            on_step(f"downloading the ops of {version}", i, len(versions))
            found[version] = fetch_ops(version, package)
    return found


def _of_folder(args: argparse.Namespace) -> dict[str, Path]:
    """Return the releases in the folder --sources, by version."""
    from attnlab.kernels.vllm.source import order

    if not args.sources.is_dir():
        refuse("sources", "a folder that exists", str(args.sources))
    found = sources_in(args.sources, package_of(args.library))
    if args.releases is not None:
        first, last = _ends(args.releases)
        for version in (first, last):
            if version not in found:
                refuse("releases", f"one of {', '.join(sorted(found, key=order))}", version)
        found = {v: p for v, p in found.items() if order(first) <= order(v) <= order(last)}
    return {version: found[version] for version in sorted(found, key=order)}


def sources_in(folder: Path, package: Package) -> dict[str, Path]:
    """Return the releases of a package in a folder, by version; print what else is in it.

    Raises InvalidCase for an archive of another package, a release that is there twice, and no release.
    """
    from attnlab.kernels.vllm.source import find_source

    found: dict[str, Path] = {}
    strays = []
    for path in sorted(folder.iterdir()):
        try:
            version = find_source(path, package).version
        except InvalidCase:
            if path.name.endswith(_ARCHIVES):
                raise
            strays.append(path.name)
            continue
        if version in found:
            text = (
                f"sources must have each release once, got {version} in {found[version]} and {path}"
            )
            raise InvalidCase(text, field="sources")
        found[version] = path
    if not found:
        refuse("sources", f"a folder with releases of {package.title}", str(folder))
    if strays:
        notice(f"left out of {folder}, because it is not a {package.title}: {', '.join(strays)}")
    return found


def _ends(text: str) -> tuple[str, str]:
    """Return the first and the last release of FIRST..LAST, or of one release."""
    from attnlab.kernels.vllm.source import check_release, order

    first, dots, last = text.partition("..")
    last = last if dots else first
    for version in (first, last):
        check_release(version)
    if order(first) > order(last):
        refuse("releases", "FIRST..LAST with FIRST not after LAST", text)
    return first, last


COMMAND = Command(
    name="releases",
    purpose="Check many releases of vLLM, or of another library, and show which has which fault.",
    arguments="[FIRST..LAST]",
    examples=(
        "attnlab releases 0.9.0..0.33.0 --out store --page releases.html",
        "attnlab releases 0.20.0..0.33.0 --op unified_attention --cases 8",
        "attnlab releases 0.9.0..0.33.0 --shard 2/4 --out shard-2",
        "attnlab releases --library sglang 0.5.9..0.5.23",
    ),
    exit_codes=CODES,
    add_flags=_add_flags,
    run=_run,
    notes=_DOCUMENT,
)


# The command ``attnlab atlas``.

_ATLAS_DOCUMENT = """\
--json prints the document of attnlab releases. A fault also has
  family: what the page lists it under
  runs: list of {op, state, releases, text, command, lines}, without what is empty: what its call did in
    each op; text: what is wrong, or why there is no verdict"""


def _add_atlas_flags(parser: argparse.ArgumentParser) -> None:
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


def _atlas(args: argparse.Namespace) -> int:
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


ATLAS_COMMAND = Command(
    name="atlas",
    purpose="Run one small call of every known fault in releases of several libraries: who has which?",
    arguments="LIBRARY:RELEASES…",
    examples=(
        "attnlab atlas vllm:0.32.0..0.33.0 --out store --page atlas.html",
        "attnlab atlas vllm:0.33.0 sglang:0.5.15..0.5.23 aiter:path/to/aiter --report reports",
    ),
    exit_codes=CODES,
    add_flags=_add_atlas_flags,
    run=_atlas,
    notes=_ATLAS_DOCUMENT,
)
