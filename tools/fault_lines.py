"""Measure how well a fault that is planted in a vLLM's Triton source is located in that source.

python tools/fault_lines.py --source WHEEL --source WHEEL --wrong 40 --seed 7 --out lines.jsonl
python tools/fault_lines.py --summary lines.jsonl

Each mutant of tools/source_mutation.py changes one expression. Mutants are drawn, the releases and ops in
turn, until enough of them give a wrong output. A mutant is located with the first hostile case of `attnlab
check` whose output is wrong where that of the unchanged op is right, with an X-ray of that case. The trial
edits are of the same kinds as the mutations, so the figures hold for faults of one expression.

A planted line counts as listed if a listed line is in the same statement. With --except-file, a draw leaves
out the mutants of earlier draws, on which the ranking was developed.
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import source_mutation
import torch
from mutant_process import error_of, run_judge

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import OPS, TRITON_OPS
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.variants import DEFAULT_CASES
from attnlab.diagnosis.claims import KernelLocation
from attnlab.diagnosis.location.lines import locate_lines
from attnlab.diagnosis.location.trials import FULL, Limit, judge_of
from attnlab.kernels import find_backend
from attnlab.kernels.triton.interpreter import limit_processes
from attnlab.kernels.triton.kernel_text import enclosing_statement
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab
from attnlab.weights.conclude import xray

RANKS = ("first", "in the first 3", "in the first 10", "listed later", "not listed", "no line")
WITHOUT_FAULT = ("not wrong", "does not run")
PLATFORM = "sm_90"
XRAY_S = 5.0
MOST_S = 150.0  # of one mutant


def main() -> None:
    """Locate mutants, or print the summary of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", action="append", type=Path, default=[], metavar="PATH")
    parser.add_argument("--op", action="append", choices=OPS_WITH_LINES, help="repeatable")
    parser.add_argument("--wrong", type=int, default=40, help="mutants with a wrong output")
    parser.add_argument("--seed", type=int, default=7, help="seed of the draw of mutants")
    parser.add_argument(
        "--except-file", type=Path, action="append", default=[], help="leave out its mutants"
    )
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no mutant after this")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--edits", type=int, default=FULL.edits, help="trial edits, at most")
    parser.add_argument("--edits-s", type=float, default=FULL.seconds, help="time for them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="one JSON object a mutant")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the table of a file")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.judge:
        print(json.dumps(judged(json.loads(args.judge.read_text()))))
    elif args.summary:
        print_summary(args.summary)
    else:
        run_all(args)


OPS_WITH_LINES = tuple(op for op in TRITON_OPS if not OPS[op].writes_cache)


def run_all(args: argparse.Namespace) -> None:
    """Locate mutants in processes of their own until enough have a wrong output; append the results."""
    began, lock, wrong = time.perf_counter(), threading.Lock(), 0
    sources = [find_source(path) for path in args.source]
    orders = drawn_orders(sources, args)
    with tempfile.TemporaryDirectory() as folder, args.out.open("a") as out:

        def work(number: int) -> None:
            nonlocal wrong
            while True:
                with lock:
                    late = time.perf_counter() - began > args.limit_s
                    order = None if late or wrong >= args.wrong else next(orders, None)
                if order is None:
                    return
                path = Path(folder) / f"{number}.json"
                path.write_text(json.dumps(order))
                result = judged_in_process(path)
                with lock:
                    wrong += result["rank"] in RANKS
                    out.write(json.dumps(result) + "\n")
                    out.flush()
                    print(f"{wrong:3} {result['rank']:16} {result['text']}", file=sys.stderr)

        with ThreadPoolExecutor(args.processes) as threads:
            list(threads.map(work, range(args.processes)))
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    print_summary(args.out)


def drawn_orders(sources: list[Source], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what identifies each mutant, one of every source and op in turn."""
    known = {
        (one["version"], one["op"], one["text"])
        for file in args.except_file
        for one in map(json.loads, file.read_text().splitlines())
    }
    draws = []
    for source, op in itertools.product(sources, args.op or OPS_WITH_LINES):
        file = source.op_file(OPS[op].module)
        found = source_mutation.mutants(file.read_text())
        drawn = source_mutation.sample(found, len(found), args.seed)
        draws.append(
            [
                {
                    "path": str(source.path),
                    "version": source.version,
                    "op": op,
                    "text": mutant.text,
                    "rule": mutant.rule,
                    "mutant": dataclasses.asdict(mutant),
                    "limit": [args.edits, args.edits_s],
                }
                for mutant in drawn
                if (source.version, op, mutant.text) not in known
            ]
        )
    for several in itertools.zip_longest(*draws):
        yield from (one for one in several if one is not None)


def judged_in_process(path: Path) -> dict[str, Any]:
    """Locate one mutant in a process of its own; one that fails or hangs is counted as that."""
    order = json.loads(path.read_text())
    done = run_judge(__file__, path, MOST_S)
    if done is None:
        return {**described(order), "rank": "takes too long"}
    if done.returncode:
        return {**described(order), "rank": "error", "error": error_of(done)}
    return json.loads(done.stdout.splitlines()[-1])


def described(order: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies a mutant in the results."""
    return {name: order[name] for name in ("version", "op", "rule", "text")}


def judged(order: dict[str, Any]) -> dict[str, Any]:
    """Return where the planted line is in the ranking of a mutant, and the ranking."""
    torch.set_num_threads(1)
    limit_processes(1)  # other mutants use the other cores
    source, op = find_source(order["path"]), order["op"]
    mutant = source_mutation.Mutant(**order["mutant"])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "vllm"
        shutil.copytree(source.root, root)
        file = root / source.op_file(OPS[op].module).relative_to(source.root)
        text = mutant.apply(file.read_text())
        file.write_text(text)
        lab, sound = Lab(source=root, device="cpu"), Lab(source=source.path, device="cpu")
        number, case = wrong_case(lab, sound, op, source)
        if case is None:
            rank = WITHOUT_FAULT[0 if number else 1]
            return {**described(order), "rank": rank}
        began = time.process_time()
        status, place = located(
            lab, case, Limit(edits=order["limit"][0], seconds=order["limit"][1])
        )
        seconds = round(time.process_time() - began, 1)
        lines = [one.line if Path(one.file) == file else 0 for one in place.lines]
        at = rank_of(lines, text, mutant.line)
    return {
        **described(order),
        "rank": rank_name(at, len(lines)),
        "at": at,
        "case": number,
        "run": case.to_cli(),
        "lines": [[one.line, one.evidence, one.score] for one in place.lines],
        "xray": status,
        "why_none": place.why_none,
        "programs": list(place.programs),
        "tried": place.tried,
        "seconds": seconds,
    }


def wrong_case(lab: Lab, sound: Lab, op: str, source: Source) -> tuple[int, Case | None]:
    """Return the first hostile case whose output is wrong only with the fault, and its number.

    Without one, return how many cases ran, and None.
    """
    backend = find_backend("vllm", source.path, "cpu")
    ran = 0
    for number, case in enumerate(hostile_cases(backend, op, PLATFORM, DEFAULT_CASES, 0)):
        if case.op_argument != NONE:
            continue  # a check locates no lines for those
        try:
            is_wrong = not is_right(lab, case)
        except AttnLabError:
            continue
        ran += 1
        if is_wrong and is_right(sound, case):
            return number, case
    return ran, None


def located(lab: Lab, case: Case, limit: Limit) -> tuple[str, KernelLocation]:
    """Return the status of an X-ray, and the lines that may hold the fault."""
    found, status = None, "none"
    try:
        found = xray(case, lab=lab, limit_s=XRAY_S, confirm=False)
        status = found.status
        return status, locate_lines(lab, case, found, limit)
    except AttnLabError as error:
        if found is not None:
            return status, KernelLocation(why_none=str(error))
    try:
        return status, locate_lines(lab, case, None, limit)
    except AttnLabError as error:
        return status, KernelLocation(why_none=str(error))


def is_right(lab: Lab, case: Case) -> bool:
    """Return whether the output of a case is right up to rounding."""
    return bool(judge_of(lab, case)(lab.output(case)).all())


def rank_of(lines: list[int], text: str, line: int) -> int | None:
    """Return the place, from 1, of the first listed line in the statement of the planted one, or None."""
    planted = enclosing_statement(text, line)
    places = [at for at, line in enumerate(lines, 1) if line in planted]
    return places[0] if places else None


def rank_name(at: int | None, count: int) -> str:
    """Return the class of a place in a list of lines."""
    if at is None:
        return RANKS[4] if count else RANKS[5]
    return RANKS[0] if at == 1 else RANKS[1] if at <= 3 else RANKS[2] if at <= 10 else RANKS[3]


def print_summary(path: Path) -> None:
    """Print how often the planted line has which rank."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter(result["rank"] for result in results)
    wrong = sum(counts[rank] for rank in RANKS)
    print(f"| planted line | of {wrong} mutants with a wrong output |\n| --- | --- |")
    for rank in RANKS:
        print(f"| {rank} | {counts[rank]} |")
    others = {name: count for name, count in counts.items() if name not in RANKS}
    print(f"\nnot counted: {others}")


if __name__ == "__main__":
    main()
