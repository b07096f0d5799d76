"""Compare the findings of ``attnlab check`` between releases of Triton, case by case.

python tools/triton_versions.py FOLDER                            all cases of three vLLMs, with four releases
python tools/triton_versions.py FOLDER 0.33.0 --sample 40         40 cases of one vLLM
python tools/triton_versions.py FOLDER SOURCE... --triton 3.6.0 3.9.0 --processes 16 --json differences.json
python tools/triton_versions.py FOLDER 0.11.2 --numpy 2.0.2 2.4.6 --pairs docs/interpreter-pairs.json

SOURCE: a wheel, an sdist, a checkout, or the number of a release, which is fetched. FOLDER keeps the releases
of Triton, as triton-3.6.0 or 3.6.0; one that is missing is installed there from the package registry. The
release that is installed here needs no folder.

Each release runs in a process of its own. FOLDER/verdicts keeps what it found, so that the same command
continues after an interruption; verdicts of another attnlab are not used. A case that an interpreter cannot
run is listed as "not run". It is not a difference; other findings are. Exit codes: 0 no difference, 1 a
difference.

--numpy: each release of Triton with each of these releases of NumPy, in place of the installed one. --pairs
adds a row for each to a table: a pair is good if as many cases run as with the first, with the same findings.
0.11.2 is checked there because it has faults that must be found.

A sample has, for each op, a case of each mask, op argument, cache dtype and dtype, in which interpreters may
differ, then cases at equal distances among the others.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
SOURCES = ("0.33.0", "0.20.2", "0.11.2")
Verdicts = dict[str, dict[str, Any]]  # by the case, in words


def main() -> int:
    """Run the comparison, or, in a process of its own, one release of Triton."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("sources", nargs="*", default=SOURCES, metavar="SOURCE")
    parser.add_argument("--triton", nargs="+", default=TRITONS, metavar="VERSION")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="cases of each source (default: all)"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--numpy", nargs="+", default=(version("numpy"),), metavar="VERSION")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all verdicts to this file")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="the table of pairs to add to")
    parser.add_argument("--verdicts", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verdicts is not None:
        args.verdicts.write_text(json.dumps(verdicts(args.sources[0], args.sample, args.processes)))
        return 0
    different, every = 0, dict[str, dict[str, Verdicts]]()
    for source in args.sources:
        pairs = [(triton, numpy) for triton in args.triton for numpy in args.numpy]
        found = {named(*pair): run_with(*pair, args, source) for pair in pairs}
        every[source] = found
        different += report(source, found)
        if args.pairs is not None:
            write_pairs(args.pairs, pairs, [*found.values()])
    if args.json is not None:
        args.json.write_text(json.dumps(every, indent=1) + "\n")
    return int(different > 0)


def named(triton: str, numpy: str) -> str:
    """Return the name of a pair; without NumPy if it is the installed one."""
    return triton if numpy == version("numpy") else f"{triton}-numpy-{numpy}"


def run_with(triton: str, numpy: str, args: argparse.Namespace, source: str) -> Verdicts:
    """Return the verdicts of one source with one release of Triton and of NumPy, from its own process."""
    sample = "all" if args.sample is None else args.sample
    name = re.sub(r"[^\w.-]", "_", source).strip("_")
    answer = args.folder / "verdicts" / f"{name}-{sample}-{named(triton, numpy)}.json"
    found: dict[str, Any] = json.loads(answer.read_text()) if answer.is_file() else {}
    if found.get("attnlab") != attnlab_version():
        answer.parent.mkdir(parents=True, exist_ok=True)
        folders = [*package(args.folder, "triton", triton), *package(args.folder, "numpy", numpy)]
        path = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, __file__, str(args.folder), source, "--verdicts", str(answer)]
        command += ["--processes", str(args.processes)]
        command += [] if args.sample is None else ["--sample", str(args.sample)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True)
        found = json.loads(answer.read_text())
    for name, asked in (("triton", triton), ("numpy", numpy)):
        if found.get(name, asked) != asked:
            raise SystemExit(f"{name} {asked} was asked for, {found[name]} was imported")
    verdicts: Verdicts = found["verdicts"]
    return verdicts


def attnlab_version() -> str:
    """Return attnlab's version, with a digest of the code that decides verdicts."""
    from attnlab.checker.case_run import versions

    return versions()["attnlab"]


def package(folder: Path, name: str, release: str) -> list[str]:
    """Return the folder that contains only this release of a package, or none if it is installed here."""
    if version(name) == release:
        return []
    for known in (release, f"{name}-{release}"):
        if (folder / known / name).is_dir():
            return [str(folder / known)]
    target = folder / f"{name}-{release}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--target", str(target), f"{name}=={release}"]
    subprocess.run(command, check=True)
    return [str(target)]


def verdicts(source: str, sample: int | None, processes: int) -> dict[str, Any]:
    """Return the verdicts of cases of a source in this environment, and its release of Triton."""
    from attnlab.case.case import Case
    from attnlab.checker.check import backend_of
    from attnlab.checker.plan import Plan, is_case
    from attnlab.kernels.vllm.source import fetch_ops
    from attnlab.tasks.local import LocalEngine
    from attnlab.tasks.task import Task

    path = Path(source) if Path(source).exists() else fetch_ops(source)
    backend = backend_of(source=path)
    plan = Plan(backend=backend, ops=backend.ops)
    tasks: Sequence[Task] = plan.tasks()
    if sample is not None:
        tasks = sampled(tasks, sample)
    found: Verdicts = {}
    names = {
        one.key: str(Case.from_dict(one.payload["case"])) if is_case(one) else one.key
        for one in tasks
    }

    def note(outcome: Any) -> None:
        verdict = outcome.verdict or {}
        found[names[outcome.key]] = {
            "status": outcome.status,
            "text": outcome.text,
            "findings": sorted(
                f"{one['kind']}: {one['diagnosis']}" for one in verdict.get("findings", ())
            ),
            "not_run": verdict.get("not_run", ""),
            "unsupported": verdict.get("unsupported", ""),
        }

    engine = LocalEngine(processes)
    try:
        engine.run(plan.job(), sorted(tasks, key=lambda one: -one.cost_s), note)
    finally:
        engine.close()
    versions = {name: version(name) for name in ("triton", "numpy")}
    return {**versions, "attnlab": attnlab_version(), "verdicts": found}


def sampled(tasks: Sequence[Any], number: int) -> list[Any]:
    """Return for each op a task of each value in which interpreters may differ, then some others."""
    kinds: dict[tuple[Any, ...], Any] = {}
    for task in tasks:
        case = task.payload["case"]
        for name in ("mask", "op_argument", "kv_cache_dtype", "dtype"):
            kinds.setdefault((case.get("op"), name, case.get(name)), task)
    chosen = {one.key: one for one in kinds.values()}
    rest = [one for one in tasks if one.key not in chosen]
    missing = max(0, number - len(chosen))
    if missing:
        chosen |= {one.key: one for one in rest[:: max(1, len(rest) // missing)][:missing]}
    return [*chosen.values()][:number]


def report(source: str, found: dict[str, Verdicts]) -> int:
    """Print what differs between releases; return in how many cases findings do."""
    different = 0
    print(f"{source}: {len(next(iter(found.values())))} cases")
    for triton, each in found.items():
        findings = Counter(one for verdict in each.values() for one in verdict["findings"])
        not_run = Counter(_why_not(verdict) for verdict in each.values() if _why_not(verdict))
        print(
            f"  Triton {triton}: {sum(findings.values())} findings, {sum(not_run.values())} not run"
        )
        for why, count in not_run.most_common():
            print(f"    not run: {count} × {why}")
    for case in dict.fromkeys(case for each in found.values() for case in each):
        seen = {triton: each[case] for triton, each in found.items() if case in each}
        ran = {t: (one["status"], one["findings"]) for t, one in seen.items() if not _why_not(one)}
        if len(seen) < len(found) or len({repr(one) for one in ran.values()}) > 1:
            different += 1
            print(f"  differs: {case}")
            for triton, verdict in seen.items():
                print(
                    f"    {triton}: {_why_not(verdict) or verdict['findings'] or verdict['status']}"
                )
    print(f"  {different} cases differ")
    return different


def write_pairs(file: Path, pairs: Sequence[tuple[str, str]], found: Sequence[Verdicts]) -> None:
    """Add a row for each pair to the table, which a test compares with the versions that are accepted."""
    table = json.loads(file.read_text()) if file.is_file() else {"pairs": []}
    rows = {(row["triton"], row["numpy"]): row for row in table["pairs"]}
    facts = [
        {
            "cases_run": sum(not _why_not(one) for one in verdicts.values()),
            "findings": sorted({text for one in verdicts.values() for text in one["findings"]}),
        }
        for verdicts in found
    ]
    where = {"python": platform.python_version(), "torch": version("torch")}
    where["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    for (triton, numpy), one in zip(pairs, facts, strict=True):
        row = {"triton": triton, "numpy": numpy, **one, **where, "good": one == facts[0]}
        rows[triton, numpy] = row
    table["pairs"] = [rows[pair] for pair in sorted(rows)]
    file.write_text(json.dumps(table, indent=1) + "\n")


def _why_not(verdict: dict[str, Any]) -> str:
    """Return why a case did not run, or ""."""
    if verdict["status"] == "not_run":
        return str(verdict["text"])
    return str(verdict["not_run"] or verdict["unsupported"])


if __name__ == "__main__":
    sys.exit(main())
