"""Run the smallest case of each fault of a table of releases on this machine's GPU; record what it does.

python tools/native_faults.py docs/releases.json --sources DIR --out docs/h100-faults.json
python tools/native_faults.py docs/releases.json --sources DIR --out FILE.json --page docs/releases.html

DIR has the ops of each release that is needed, as ``attnlab releases --sources`` takes them. Without
``--all`` only the faults run that a GPU has not confirmed, in the releases that the table names. Each record
has the output (its largest error, wrong elements and NaN), the error if there is none, and the findings of a
check.
``--page`` writes the table with these runs, as HTML and JSON. ``--device cpu`` runs the cases under Triton's
interpreter, to compare. Exit codes: 0 all ran; 2 bad input; 3 a case did not run.
"""

import argparse
import dataclasses
import datetime
import html
import json
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, DeviceLost, OutOfMemory
from attnlab.case.shown import json_value
from attnlab.checker.case_check import CheckJob
from attnlab.checker.case_run import run_case, versions
from attnlab.checker.plan import estimated_bytes
from attnlab.checker.releases import (
    NATIVE,
    NATIVE_LIMIT_S,
    UNTRIED,
    YES,
    Fault,
    NativeRun,
    ReleaseTable,
    releases_of,
    run_task,
)
from attnlab.cli.releases import sources_in
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.reports.check_pages import write_releases
from attnlab.tasks.run import find_engine
from attnlab.tasks.task import Outcome, Task


@dataclass(frozen=True, kw_only=True)
class NativeJob(CheckJob):
    """Checks cases, and adds their ``output``: the largest error, or why there is no output."""

    def run(self, state: Any, payload: dict[str, Any]) -> dict[str, Any]:
        backend, lab = state.library(payload["library"])
        case = Case.from_dict(payload["case"])
        try:
            output = run_case(lab, backend, case).output
            call = lab.call(case)
            call.buffer.copy_(output)
            errors = lab.errors(case, call, lab.reference(case))
            facts = {**errors.to_dict(), "nan": int(output.isnan().sum())}
        except (DeviceLost, OutOfMemory):
            raise
        except AttnLabError as error:
            facts = {"error": str(error)}
        found: dict[str, Any] = json_value({**super().run(state, payload), "output": facts})
        return found


def main() -> int:
    """Run the cases, write the document, and print a line for each; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, help="the JSON of attnlab releases --page")
    parser.add_argument("--sources", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--page", type=Path, metavar="FILE.html", help="write the table, too")
    parser.add_argument("--all", action="store_true", help="also the faults that are confirmed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine", default="local:4", help="default: local:4")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("native_faults.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    table = ReleaseTable.from_dict(json.loads(args.table.read_text()))
    chosen = [f for f in table.faults if args.all or f.is_native not in (YES, UNTRIED)]
    sources, needed = sources_in(args.sources), {v for fault in chosen for v in fault.native}
    if missing := sorted(needed - set(sources)):
        print(f"sources must have each release, {', '.join(missing)} is missing", file=sys.stderr)
        return 2
    found = {v: path for v, path in sources.items() if v in needed}
    backends = {one.version: one.backend for one in releases_of(found, args.device)}
    records, faults = [], list[Fault]()
    runs = run_all(chosen, backends, args)
    for fault in table.faults:
        native = {v: NativeRun.of(*run, fault.finding) for v, run in runs(fault)}
        records += [record(fault, v, native[v], *run) for v, run in runs(fault)]
        faults.append(dataclasses.replace(fault, native={**fault.native, **native}))
    args.out.write_text(json.dumps(document(args.device, records), indent=1) + "\n")
    if args.page is not None:
        write_table(args, dataclasses.replace(table, faults=faults))
    return 3 if any(one["native"]["is_confirmed"] is None for one in records) else 0


def write_table(args: argparse.Namespace, table: ReleaseTable) -> None:
    """Write the table; its page names the command of the given table's page, and this one."""
    earlier = re.search(
        "<code>(attnlab releases[^<]*)", args.table.with_suffix(".html").read_text()
    )
    commands = [html.unescape(earlier[1])] if earlier else []
    commands.append(shlex.join(["python", "tools/native_faults.py", *sys.argv[1:]]))
    write_releases(args.page, table, "; ".join(commands))
    text = json.dumps(json_value(table.to_dict()), indent=1)
    args.page.with_suffix(".json").write_text(text + "\n")


Run = tuple[Task, Outcome]


def run_all(
    faults: Sequence[Fault], backends: Mapping[str, VllmBackend], args: argparse.Namespace
) -> Callable[[Fault], list[tuple[str, Run]]]:
    """Run the cases; return a function of a fault that gives its runs by release."""
    tasks = {id(fault): dict(tasks_of(fault, backends)) for fault in faults}
    outcomes: dict[str, Outcome] = {}
    every = {task.key: task for of in tasks.values() for task in of.values()}
    job = NativeJob(libraries=dict(backends), device=args.device)
    with find_engine(args.engine, args.device) as engine:
        engine.run(job, [*every.values()], lambda one: outcomes.__setitem__(one.key, one))
    return lambda fault: [
        (version, (task, outcomes[task.key])) for version, task in tasks.get(id(fault), {}).items()
    ]


def tasks_of(fault: Fault, backends: Mapping[str, VllmBackend]) -> Iterator[tuple[str, Task]]:
    """Yield the tasks of a fault by release: those of its earlier runs on a GPU."""
    for version in fault.native:
        backend = backends[version]
        memory = estimated_bytes(fault.finding.case, backend)
        like = Task(key="", payload={}, memory_bytes=memory, limit_s=NATIVE_LIMIT_S)
        task = run_task(fault.finding, version, backend.release, like, NATIVE)
        if task is not None:
            yield version, task


def record(
    fault: Fault, version: str, native: NativeRun, task: Task, outcome: Outcome
) -> dict[str, Any]:
    """Return what a run of a fault's case showed, as JSON-able values; print a line."""
    finding, verdict = fault.finding, outcome.verdict or {}
    case = Case.from_dict(task.payload["case"])
    print(
        f"{version} {finding.op}, {finding.diagnosis}: {native.text()} {native.evidence}",
        flush=True,
    )
    return {
        "op": finding.op,
        "kind": finding.kind,
        "diagnosis": finding.diagnosis,
        "release": version,
        "native": {"text": native.text(), **dataclasses.asdict(native)},
        "output": verdict.get("output"),
        "status": outcome.status,
        "error": outcome.text,
        "findings": [
            {name: one[name] for name in ("kind", "diagnosis", "evidence")}
            for one in verdict.get("findings", ())
        ],
        "seconds": outcome.seconds,
        "run": case.to_cli(),
    }


def document(device: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document: where the cases ran, and their records."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "where": torch.cuda.get_device_name() if device == "cuda" else "Triton interpreter",
        "versions": {**versions(), "python": platform.python_version()},
        "runs": list(records),
    }


if __name__ == "__main__":
    sys.exit(main())
