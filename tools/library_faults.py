"""Plant faults in the ops of a library other than vLLM, check each, and write what the check says.

    python tools/library_faults.py aiter SOURCE --rules 6 --seed 1 --out faults.json

Faults by hand are in docs/library-faults.json, as those of tools/hand_faults.py; --rules N adds as many by
the rules of tools/source_mutation.py, in lines of kernels that cases of the check run. SOURCE is a checkout.
What the check finds without a fault is left out, so that a source without faults is the better one to plant
them in. If nothing explains the output of the first finding, the main statement is that of ``diagnose`` for
the Case that showed it first. Whether a statement is right is judged by a reader.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hand_faults
import source_mutation

from attnlab.case.ops import OPS
from attnlab.case.shown import renderer
from attnlab.checker.check import check
from attnlab.checker.finding import Finding
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.trials import FULL
from attnlab.kernels.vllm.features import op_functions
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab
from attnlab.library.op import ops_of, package_of

PLANTED = Path(__file__).parents[1] / "docs" / "library-faults.json"
_FURTHER = {"aiter": ["aiter/ops/triton/configs"]}  # folders that the ops read
Key, Line = tuple[str, ...], tuple[str, int]
_NOT_EXPLAINED = ("unexplained", "unnamed", "own slot", "slot without owner")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A fault in a file of an op: its name, who made it ("hand" or "rule"), lines, and the changed text."""

    name: str
    op: str
    by: str
    file: Path
    lines: list[int]
    text: str


def by_hand(source: Source, ops: list[str], path: Path) -> list[Planted]:
    """Return the faults by hand that the source has a place for."""
    found = []
    for fault in hand_faults.read_faults(path):
        for file in _files_of(source, fault.op) if fault.op in ops else ():
            text = file.read_text()
            try:
                lines, changed = fault.lines(text), fault.apply(text)
            except hand_faults.NoPlace:
                continue
            found.append(
                Planted(
                    name=fault.name, op=fault.op, by="hand", file=file, lines=lines, text=changed
                )
            )
    return found


def by_rule(
    source: Source, gaps: dict[str, set[Line]], count: int, seed: int, place: str
) -> list[Planted]:
    """Return ``count`` faults by rule, of the ops in turn, in lines that cases run."""
    drawn = []
    for op, unreached in gaps.items():
        mutants = [
            (one.file, mutant)
            for one in op_functions(source, op)
            if one.is_kernel and place in one.file.name
            for mutant in source_mutation.mutants(one.file.read_text())
            if one.line <= mutant.line <= one.last_line
            and (one.file.relative_to(source.root).as_posix(), mutant.line) not in unreached
        ]
        files = {mutant: file for file, mutant in mutants}
        chosen = source_mutation.sample([*files], count, seed)
        drawn.append(
            [
                Planted(
                    name=one.text,
                    op=op,
                    by="rule",
                    file=files[one],
                    lines=[one.line],
                    text=one.apply(files[one].read_text()),
                )
                for one in chosen
            ]
        )
    return [each[i] for i in range(count) for each in drawn if i < len(each)][:count]


def sound_facts(
    library: str, source: Path, ops: list[str], path: Path | None
) -> tuple[dict[Key, int], dict[str, set[Line]]]:
    """Return what the check finds without a fault, by the number of cases, and the lines that no case runs.

    ``path``: a file that keeps them.
    """
    if path is None or not path.is_file():
        usual, gaps = [], {}
        for op in ops:
            report = check(
                library=library, source=source, ops=[op], engine="local:1", coverage=True
            )
            usual += [[_key(one), one.seen] for one in report.findings]
            lines = (*report.coverage[op].missing, *report.coverage[op].excused)
            gaps[op] = [(gap.file, gap.line) for gap in lines]
        text = json.dumps([usual, gaps])
        if path is not None:
            path.write_text(text)
    else:
        text = path.read_text()
    usual, gaps = json.loads(text)
    return {tuple(key): seen for key, seen in usual}, {op: {*map(tuple, gaps[op])} for op in ops}


def _files_of(source: Source, op: str) -> list[Path]:
    return sorted({one.file for one in op_functions(source, op) if one.is_kernel})


def outcome(
    library: str,
    source: Source,
    fault: Planted,
    cases: int,
    usual: dict[Key, int],
    diagnoses: bool = True,
) -> dict[str, Any]:
    """Check a copy of the source with a fault; all cases run if ``cases`` per op find nothing unusual.

    ``diagnoses``: diagnose what nothing explains.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "source"
        for one in (*source.ops_folders, *_FURTHER.get(library, ())):
            shutil.copytree(source.root / one, root / one, dirs_exist_ok=True)
        (root / fault.file.relative_to(source.root)).write_text(fault.text)
        for count in (cases, None):
            report = check(
                library=library, source=root, ops=[fault.op], cases=count, engine="local:1"
            )
            new = [one for one in report.findings if one.seen > usual.get(_key(one), 0)]
            if new:
                break
        statement = new[0].title if new else ""
        if new and diagnoses and new[0].diagnosis in _NOT_EXPLAINED:
            statement = _diagnosed(new[0], library, root)
        found = [_shown(one) for one in new]
    fields = {name: getattr(fault, name) for name in ("name", "op", "by", "lines")}
    fields["file"] = fault.file.relative_to(source.root).as_posix()
    seconds = round(time.perf_counter() - began, 1)
    observed = [one.title for one in report.observations]
    return {
        **fields,
        "cases": report.cases_run,
        "seconds": seconds,
        "statement": statement,
        "findings": found,
        "observations": observed,
    }


def _diagnosed(finding: Finding, library: str, root: Path) -> str:
    """Return what ``diagnose`` says of the Case that showed a finding first."""
    case = (finding.first or finding.case).replace(backend=f"library:{library}")
    return renderer().plain(diagnose(case, lab=Lab(source=root), limit=FULL))


def _key(finding: Finding) -> Key:
    return finding.op, finding.kind, finding.diagnosis, finding.description


def _shown(finding: Finding) -> dict[str, Any]:
    """Return what a report says of a finding."""
    fields = {name: getattr(finding, name) for name in ("kind", "title", "diagnosis", "evidence")}
    return {**fields, "seen": finding.seen, "run": finding.run()}


def main() -> None:
    """Check every fault, and write the outcomes after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("library")
    parser.add_argument("source", type=Path)
    parser.add_argument("--hand", type=Path, default=PLANTED, help="the file of faults by hand")
    parser.add_argument("--only", default="", help="a part of the names of faults")
    parser.add_argument("--rules", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--place", default="", help="a part of the file names, for faults by rule")
    parser.add_argument("--sound", type=Path, help="a file that keeps what the sound source shows")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--no-diagnosis", action="store_true", help="only check, which is faster")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    source = find_source(args.source, package_of(args.library))
    ops = [op.name for op in ops_of(args.library) if OPS[op.name].is_triton]
    usual, gaps = sound_facts(args.library, args.source, ops, args.sound)
    faults = by_hand(source, ops, args.hand)
    faults += by_rule(source, gaps, args.rules, args.seed, args.place)
    done: list[dict[str, Any]] = []
    for fault in [one for one in faults if args.only in one.name]:
        done.append(outcome(args.library, source, fault, args.cases, usual, not args.no_diagnosis))
        args.out.write_text(json.dumps(done, indent=1) + "\n")
        shown = [done[-1][name] for name in ("seconds", "op", "name", "cases", "statement")]
        print(*shown, "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
