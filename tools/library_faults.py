"""Plant faults in the ops of a library other than vLLM, check each, and write what the check says.

    python tools/library_faults.py aiter SOURCE --out faults.json

Faults by hand are in docs/library-faults.json, as those of tools/hand_faults.py; --rules N adds as many by
the rules of tools/source_mutation.py, drawn from the kernels of all ops. SOURCE is a checkout. Whether a
statement is right is judged by a reader; a located line within one of the fault's is noted.
"""

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import hand_faults
import source_mutation

from attnlab.case.ops import OPS
from attnlab.checker.check import check
from attnlab.checker.report import with_source_lines
from attnlab.kernels import find_backend
from attnlab.kernels.vllm.features import op_functions
from attnlab.kernels.vllm.source import find_source
from attnlab.library.op import ops_of, package_of

PLANTED = Path(__file__).parents[1] / "docs" / "library-faults.json"


def files_of(source: Any, op: str) -> list[Path]:
    """Return the files with the kernels of an op."""
    return sorted({one.file for one in op_functions(source, op) if one.is_kernel})


def rule_mutants(source: Any, op: str) -> list[tuple[Path, source_mutation.Mutant]]:
    """Return the mutants of the kernels of an op, each with its file."""
    found = []
    for one in op_functions(source, op):
        if one.is_kernel:
            inside = range(one.line, one.last_line + 1)
            every = source_mutation.mutants(one.file.read_text())
            found += [(one.file, mutant) for mutant in every if mutant.line in inside]
    return found


def planted(source: Any, ops: list[str], rules: int, seed: int) -> list[dict[str, Any]]:
    """Return the faults: name, op, file, line, and the text of the file with the fault."""
    found = []
    for fault in hand_faults.read_faults(PLANTED):
        for file in files_of(source, fault.op) if fault.op in ops else ():
            text = file.read_text()
            try:
                lines = fault.lines(text)
            except hand_faults.NoPlace:
                continue
            fields = {"name": fault.name, "op": fault.op, "file": file, "lines": lines}
            found.append({**fields, "by": "hand", "text": fault.apply(text)})
    draw = random.Random(seed)
    for i in range(rules):
        op = ops[i % len(ops)]
        file, mutant = draw.choice(rule_mutants(source, op))
        text = file.read_text()
        name = f"{mutant.rule}: {mutant.before} becomes {mutant.after}"
        fields = {"name": name, "op": op, "file": file, "lines": [mutant.line]}
        found.append({**fields, "by": "rule", "text": mutant.apply(text)})
    return found


def outcome(
    library: str, source: Any, fault: dict[str, Any], cases: int | None, usual: set[tuple[str, str]]
) -> dict[str, Any]:
    """Check a copy of the source with a fault; return what was found besides the ``usual`` findings.

    If nothing is found in ``cases`` cases, all run.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "source"
        for one in (*source.ops_folders, *_FURTHER.get(library, ())):
            shutil.copytree(source.root / one, root / one, dirs_exist_ok=True)
        (root / fault["file"].relative_to(source.root)).write_text(fault["text"])
        for count in (cases, None):
            report = check(
                library=library, source=root, ops=[fault["op"]], cases=count, engine="local:1"
            )
            new = [one for one in report.findings if (one.kind, one.diagnosis) not in usual]
            if new or not fault["lines"]:
                break
        report = dataclasses.replace(report, findings=new)
        if fault["lines"]:
            report = with_source_lines(report, find_backend(f"library:{library}", root))
    findings = [
        {
            **{"kind": one.kind, "diagnosis": one.diagnosis, "evidence": one.evidence},
            **{"description": one.to_dict()["description"], "no_lines": one.no_lines},
            "lines": [line.line for line in one.lines],
            "reasons": [line.reason for line in one.lines],
        }
        for one in report.findings
    ]
    near = any(abs(a - b) <= 1 for one in findings for a in one["lines"] for b in fault["lines"])
    shown = {name: fault[name] for name in ("name", "op", "by", "lines")}
    shown |= {"file": fault["file"].relative_to(source.root).as_posix(), "line_found": near}
    return {**shown, "cases": report.cases_run, "findings": findings}


_FURTHER = {"aiter": ["aiter/ops/triton/configs"]}  # folders that the ops read


def main() -> None:
    """Check every fault, and write the outcomes after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("library")
    parser.add_argument("source", type=Path)
    parser.add_argument("--rules", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    source = find_source(args.source, package_of(args.library))
    ops = [op.name for op in ops_of(args.library) if OPS[op.name].is_triton]
    done: list[dict[str, Any]] = []
    usual: set[tuple[str, str]] = set()
    for op in ops:  # what the check finds without a fault
        file = files_of(source, op)[0]
        sound = {
            "name": "",
            "op": op,
            "by": "",
            "lines": [],
            "file": file,
            "text": file.read_text(),
        }
        found = outcome(args.library, source, sound, None, set())["findings"]
        usual |= {(one["kind"], one["diagnosis"]) for one in found}
        print(op, found, file=sys.stderr)
    for fault in planted(source, ops, args.rules, args.seed):
        done.append(outcome(args.library, source, fault, args.cases, usual))
        args.out.write_text(json.dumps(done, indent=1) + "\n")
        print(json.dumps(done[-1])[:600], file=sys.stderr)


if __name__ == "__main__":
    main()
