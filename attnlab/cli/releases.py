"""The commands ``attnlab releases``, ``attnlab atlas`` and ``attnlab merge``."""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.fields import refuse
from attnlab.case.output_file import HTML, check_output_file, make_output_folder, write_text
from attnlab.cli.check import check_run_flags, step_text
from attnlab.cli.command import notice, print_json, progress, put, runs, show
from attnlab.cli.sharded import (
    check_ci_files,
    print_power,
    print_report,
    print_shard,
    write_ci_files,
)
from attnlab.library.op import Package, libraries, package_of
from attnlab.tasks.run import interruptible

if TYPE_CHECKING:
    from attnlab.checker.releases import ReleasePlan, ReleaseTable
    from attnlab.tasks.task import Engine, Outcome, Stop


_ARCHIVES = (".whl", ".tar.gz", ".zip")


@runs("releases")
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
    table, code = _checked(args, plan, check_releases, args.device, is_native=args.native)
    print_table(args, table)
    return code or table.exit_code


def _checked(
    args: argparse.Namespace,
    plan: "ReleasePlan",
    check: "Callable[..., ReleaseTable]",
    device: str,
    *,
    is_native: bool = False,
) -> "tuple[ReleaseTable, int]":
    """Run a plan by ``check``; return the table, and the exit code of a signal or 0."""
    from attnlab.tasks.run import find_engine
    from attnlab.tasks.store import Shard

    title = f"checking {len(plan.releases)} releases"
    with (
        interruptible() as stop,
        progress(title) as on_step,
        find_engine(args.engine or "local", device, stop) as engine,
        _gpu(is_native, args.engine, stop) as native,
    ):
        table = check(
            plan,
            engine,
            **({"native": native} if is_native else {}),
            shard=Shard.parse(args.shard),
            out=args.out,
            seconds=args.seconds,
            on_progress=lambda one: on_step(step_text(title, one), one.done, one.total),
            stop=stop,
        )
    if stop():
        notice("interrupted; the table has what ran")
    return table, stop.exit_code


def _gpu(
    is_wanted: bool, engine: str | None, stop: "Stop"
) -> "AbstractContextManager[Engine | None]":
    """Return the engine of this machine's GPUs, if it is wanted, with as many workers as a local engine."""
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
        raise InvalidCase("releases must be FIRST..LAST, or --sources must be given")
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
    """Return the releases of a package in a folder, by version; print what else is in it."""
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
            raise InvalidCase(text)
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


@runs("atlas")
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

    faults = {f: line for path in args.faults or () for f, line in read_faults(path).items()}
    releases = [one for library, paths in found for one in releases_of(paths, "cpu", library)]
    with progress("choosing the calls"):
        plan = atlas_plan(releases, faults=faults, case_seconds=args.case_seconds, times=args.times)
    table, code = _checked(args, plan, check_atlas, "cpu")
    if args.report is not None:
        from attnlab.checker.atlas import newest_findings
        from attnlab.reports.upstream import write_reports

        backends = {one.version: one.backend for one in releases}
        for version, findings in newest_findings(table).items():
            backend = backends[version]
            folder = args.report / version.partition(" ")[0]
            write_reports(findings, folder, backend.version, "cpu", backend)
    print_table(args, table)
    return code or table.exit_code


def _sources(text: str) -> tuple[str, dict[str, Path]]:
    """Return a library and the paths of its releases, by name and version, of LIBRARY:RELEASES."""
    library, colon, releases = text.partition(":")
    if not colon or library not in libraries():
        refuse("releases", f"LIBRARY:RELEASES with a library of {', '.join(libraries())}", text)
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


Outcomes = Mapping[str, "Outcome"]
# Flags, and the command whose stores they need.
_OWNERS = {
    "known": ("check",),
    "junit": ("check",),
    "sarif": ("check",),
    "page": ("releases", "atlas"),
}


@runs("merge")
def _merge(args: argparse.Namespace) -> int:
    from attnlab.tasks.store import merged_stores

    check_ci_files(args)
    check_page(args)
    header, outcomes = merged_stores(args.dir)
    command = header["command"]
    for field, owners in _OWNERS.items():
        if getattr(args, field) is not None and command not in owners:
            raise InvalidCase(f"{field} must not be given with {command}")
    runs = {
        "check": _check_of_shards,
        "power": _power_of_shards,
        "releases": _releases_of_shards,
        "atlas": _releases_of_shards,
        "matrix": _matrix_of_shards,
    }
    run = runs.get(command)
    if run is None:
        raise InvalidCase(f"dir must be stores that merge can join, got {command}")
    return run(args, header, outcomes)


def _check_of_shards(args: argparse.Namespace, header: dict[str, Any], outcomes: Outcomes) -> int:
    from attnlab.checker.finding import read_known
    from attnlab.checker.report import merged_check

    known = [] if args.known is None else read_known(args.known)
    report = merged_check(header, outcomes, known)
    write_ci_files(args, report)
    print_report(report, args.json)
    return report.exit_code


def _releases_of_shards(
    args: argparse.Namespace, header: dict[str, Any], outcomes: Outcomes
) -> int:
    from attnlab.checker.atlas import merged_atlas
    from attnlab.checker.releases import merged_releases

    merged = {"releases": merged_releases, "atlas": merged_atlas}
    table = merged[header["command"]](header, outcomes)
    print_table(args, table)
    return table.exit_code


def _power_of_shards(args: argparse.Namespace, header: dict[str, Any], outcomes: Outcomes) -> int:
    from attnlab.case.case import Case
    from attnlab.mutation.power import power_report, power_tasks
    from attnlab.tasks.store import ALL
    from attnlab.tasks.task import NOT_RUN, Outcome

    case = Case.from_dict(header["case"])
    found = {
        task.key: outcomes.get(task.key)
        or Outcome(key=task.key, status=NOT_RUN, text="its shard was stopped before")
        for task in power_tasks(case)
    }
    if any(one.verdict is None for one in found.values()):
        return print_shard(ALL, found, args.json)
    seconds = sum(one.seconds for one in found.values())
    return print_power(power_report(case, found, seconds), args.json)


def _matrix_of_shards(args: argparse.Namespace, header: dict[str, Any], outcomes: Outcomes) -> int:
    from attnlab.checker.matrix import merged_matrix

    table = merged_matrix(header, outcomes)
    put(table, args.json)
    return table.exit_code
