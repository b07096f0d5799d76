"""Plant faults in ops of linear attention, check each op, and write what the check says.

    python tools/state_faults.py --source fla=WHEEL --source vllm_linear=WHEEL --out faults.json

Faults by hand are in docs/state-faults.json; --rules N adds as many by the rules of tools/source_mutation.py,
drawn from the files of the faults by hand, of those that change a result. What an op shows without a fault is
left out. Whether a statement is right is judged by a reader.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import source_mutation

from attnlab.kernels.triton.probe import Probe, probing
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.library.op import StateOp, package_of
from attnlab.linear.run import SourceRunner
from attnlab.linear.state_call import make_call
from attnlab.linear.state_case import STATE_OPS, variants_of
from attnlab.linear.state_check import check_op

PLANTED = Path(__file__).parents[1] / "docs" / "state-faults.json"


def file_of(source: Source, name: str) -> Path:
    """Return a file of a source by its name in a folder of ops."""
    return next(path for one in source.ops_folders if (path := source.root / one / name).is_file())


def outcome(source: Source, op: str, file: Path, text: str) -> list[dict[str, Any]]:
    """Return what a check of an op finds in a copy of the source with another text of a file."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "source"
        name = source.package.name
        shutil.copytree(source.root / name, root / name)
        (root / file.relative_to(source.root)).write_text(text)
        found = check_op(STATE_OPS[op], find_source(root, source.package))
        return [one.to_dict() for one in found.findings]


def lines_that_run(op: StateOp, source: Source) -> set[tuple[str, int]]:
    """Return the files and lines of kernels that some cases of an op run."""
    run, probe = SourceRunner(source=source), Probe(records=True)
    with probing(probe):
        for case in list(variants_of(op).values())[:3]:
            run(make_call(case))
    return {
        line for launch in probe.launches for program in launch.programs for line in program.lines
    }


def by_rule(faults: list[dict[str, str]], sources: dict[str, Source], seed: int) -> Any:
    """Yield faults by rule in lines that run, in the files of those by hand, in a drawn order without end."""
    draw, ran = random.Random(seed), dict[str, set[tuple[str, int]]]()
    places = sorted({(one["op"], one["file"]) for one in faults})
    while True:  # the caller ends it
        op, name = draw.choice(places)
        source = sources[STATE_OPS[op].library]
        file = file_of(source, name)
        text = file.read_text()
        if op not in ran:
            ran[op] = lines_that_run(STATE_OPS[op], source)
        known = {line for path, line in ran[op] if Path(path) == file}
        mutants = [one for one in source_mutation.mutants(text) if one.line in known]
        if not mutants:
            continue
        mutant = draw.choice(mutants)
        yield {"op": op, "file": name, "name": mutant.text}, mutant.apply(text)


def main() -> None:
    """Check every fault, and write the outcomes after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", action="append", required=True, metavar="LIBRARY=PATH")
    parser.add_argument("--hand", type=Path, default=PLANTED, help="the file of faults by hand")
    parser.add_argument("--only", default="", help="a part of the names of faults by hand")
    parser.add_argument("--no-hand", action="store_true", help="only faults by rule")
    parser.add_argument("--rules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    given = dict(one.split("=", 1) for one in args.source)
    sources = {name: find_source(path, package_of(name)) for name, path in given.items()}
    faults, done, usual = json.loads(args.hand.read_text()), [], {}

    def add(fault: dict[str, str], text: str, by: str) -> bool:
        source, began = sources[STATE_OPS[fault["op"]].library], time.perf_counter()
        file = file_of(source, fault["file"])
        if fault["op"] not in usual:
            sound = outcome(source, fault["op"], file, file.read_text())
            usual[fault["op"]] = {one["title"] for one in sound}
        found = outcome(source, fault["op"], file, text)
        new = [one for one in found if one["title"] not in usual[fault["op"]]]
        shown = [{key: one[key] for key in ("kind", "title", "is_rule", "run")} for one in new]
        seconds = round(time.perf_counter() - began, 1)
        done.append({**fault, "by": by, "seconds": seconds, "findings": shown})
        args.out.write_text(json.dumps(done, indent=1) + "\n")
        print(json.dumps(done[-1])[:900], file=sys.stderr, flush=True)
        return bool(new)

    for fault in [] if args.no_hand else [one for one in faults if args.only in one["name"]]:
        file = file_of(sources[STATE_OPS[fault["op"]].library], fault["file"])
        text = file.read_text()
        if text.count(fault["before"]) < 1:
            raise SystemExit(f"{fault['file']} must have {fault['before']!r}")
        add(
            {k: fault[k] for k in ("op", "file", "name")},
            text.replace(fault["before"], fault["after"]),
            "hand",
        )
    count = 0
    for fault, text in by_rule(faults, sources, args.seed) if args.rules else ():
        count += add(fault, text, "rule")
        if count >= args.rules:
            break


if __name__ == "__main__":
    main()
