"""Measure whether the diagnosis of a saved call says what the diagnosis of its Case says.

python tools/same_statement.py --source FOLDER --count 60 --catalogue 40 --seed 7 --out statements.jsonl
python tools/same_statement.py --summary statements.jsonl

Faults are planted in two ways: edits of vLLM's Triton sources (those of docs/hand-faults.json, and mutants of
tools/source_mutation.py), and defects of the catalogue in a kernel of one's own. For each, the first
hostile or random case is taken whose output is wrong, and right without the fault. It is diagnosed as a Case,
then saved as `attnlab run --save-call` saves it, loaded, and diagnosed with the kernel as its runner. The
search for source lines is left out of both. Compared is the main claim, the first sentence; the numbers of
further cases and of candidates do not count. Each fault has a process of its own.

A call does not hold the seed of its Case, so its varied cases have other numbers. Where the claims differ,
the Case is diagnosed with two other seeds: if one says what the call says, the numbers make the difference.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import source_mutation
import torch
from fault_injection import applicable, random_case
from hand_faults import HAND_FAULTS, NoPlace
from mutant_process import error_of, run_judge
from real_faults import HELPERS, mutated_file, plant

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import MERGE, OPS, TRITON_OPS
from attnlab.checker.hostile import DEFAULT_CASES, hostile_cases
from attnlab.defects import DEFECTS
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend
from attnlab.kernels.triton.interpreter import limit_processes
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.tensors.call import KernelCall

LIMIT_S = 400.0
_MOST_CASES = 24  # hostile cases that are run to find a wrong output
_MOST_TOKENS = 1 << 12  # of a case's sequences, so that it is diagnosed in seconds
_NUMBERS = re.compile(r" \(confirmed on [^)]*\)|none of \d+ candidates")
_KERNEL = '''"""Attention with a defect of the catalogue."""

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.defects import DEFECTS
from attnlab.lab.problem import Problem, all_rows


def kernel(call):
    """Write attention with the defect, in every row."""
    problem = Problem.of_call(call, Target.of(Case(platform="{platform}")), ("{op}",)).with_kernel_rounding()
    for rows in all_rows(problem, "all"):
        found = DEFECTS["{name}"].compute(problem, rows).output
        call.output[problem.rows(rows)] = found.to(call.output.dtype)


kernel.op = "{op}"
'''


def main() -> None:
    """Judge the faults, or print the summary of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="a vLLM whose sources are edited")
    parser.add_argument("--count", type=int, default=60, help="edits of the sources")
    parser.add_argument("--catalogue", type=int, default=40, help="defects of the catalogue")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no fault after this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="one JSON object a fault")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="only faults of which a file has wrong outputs"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the table of a file")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.judge:
        print(json.dumps(judge(json.loads(args.judge.read_text()))))
    elif args.summary:
        print_summary(args.summary)
    else:
        run_all(args)


def run_all(args: argparse.Namespace) -> None:
    """Judge all faults one after the other, and append the results to the file."""
    began, wanted = time.perf_counter(), {"source": args.count, "catalogue": args.catalogue}
    source = find_source(args.source)
    orders = [*source_orders(source, args.count, args.seed), *catalogue_orders(args.seed)]
    random.Random(args.seed).shuffle(orders)
    if args.again is not None:
        known = {fault_of(one) for one in read(args.again) if one["class"] in ("same", "other")}
        orders = [order for order in orders if fault_of(order) in known]
    with tempfile.TemporaryDirectory() as folder, args.out.open("a") as out:
        for order in orders:
            if wanted[order["kind"]] <= 0 or time.perf_counter() - began > args.limit_s:
                continue
            path = Path(folder) / "order.json"
            path.write_text(json.dumps(order))
            done = run_judge(__file__, path, LIMIT_S)
            if done is None or done.returncode:
                found = {"class": "error", "error": "time" if done is None else error_of(done)}
            else:
                found = json.loads(done.stdout)
            wanted[order["kind"]] -= found["class"] in ("same", "other")
            names = ("kind", "op", "text")
            out.write(json.dumps({**{name: order[name] for name in names}, **found}) + "\n")
            out.flush()
            print(f"{found['class']:8} {order['op']}: {order['text']}", file=sys.stderr)
    print_summary(args.out)


def fault_of(one: dict[str, Any]) -> tuple[str, str, str]:
    """Return what identifies a fault in orders and results."""
    return one["kind"], one["op"], one["text"]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def source_orders(source: Source, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield what plants each fault in the sources: those written by hand, and drawn mutants."""
    for op in TRITON_OPS:
        if OPS[op].writes_cache:
            continue
        own = mutated_file(source, "vllm", op)
        common = {"kind": "source", "root": str(source.root), "op": op, "seed": seed}
        for fault in (one for one in HAND_FAULTS if one.op == op):
            for file in (own, *own.parent.glob(HELPERS)):
                try:
                    fault.lines(file.read_text())
                except NoPlace:
                    continue
                place = {"file": str(file.relative_to(source.root)), "text": fault.name}
                yield {**common, **place, "by_hand": dataclasses.asdict(fault)}
                break
        drawn = source_mutation.sample(source_mutation.mutants(own.read_text()), count, seed)
        for mutant in drawn:
            place = {"file": str(own.relative_to(source.root)), "text": mutant.text}
            yield {**common, **place, "mutant": dataclasses.asdict(mutant)}


def catalogue_orders(seed: int) -> Iterator[dict[str, Any]]:
    """Yield what plants each defect of the catalogue in a kernel of one's own."""
    for i, name in enumerate(DEFECTS):
        yield {"kind": "catalogue", "op": "", "text": name, "seed": seed * 1000 + i}


def judge(order: dict[str, Any]) -> dict[str, Any]:
    """Return both main claims about the first wrong output under a fault, and whether they are the same."""
    torch.set_num_threads(1)
    limit_processes(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ATTNLAB_CACHE"] = str(Path(folder) / "cache")
        find = wrong_source_case if order["kind"] == "source" else wrong_catalogue_case
        found = find(order, Path(folder))
        if found is None:
            return {"class": "no change seen"}
        return compared(*found, Path(folder) / "call.safetensors")


def compared(case: Case, lab: Lab, file: Path) -> dict[str, Any]:
    """Diagnose a Case, and its saved call with its kernel; return what both say."""
    began = time.process_time()
    first = diagnose(case, lab=lab, propose=False, limit=None)
    middle = time.process_time()
    lab.run(case).recorded_call.save(file)
    given = ("platform", "release")
    again = diagnose_captured(
        KernelCall.load(file), case, given=given, runner=lab.backend(case), limit=None
    )
    claims = [_claim(first), _claim(again)]
    seeds = () if claims[0] == claims[1] else (0, case.seed + 1)
    return {
        "class": "other" if seeds else "same",
        "case": case.to_cli(),
        "claims": claims,
        "other_seeds": [
            _claim(diagnose(case.replace(seed=seed), lab=lab, propose=False, limit=None))
            for seed in seeds
        ],
        "status": [first.status, again.status],
        "unknown": again.unknown,
        "seconds": [round(middle - began, 1), round(time.process_time() - middle, 1)],
    }


def _claim(found: Diagnosis) -> str:
    return _NUMBERS.sub("", found.conclusion)


def wrong_source_case(order: dict[str, Any], folder: Path) -> tuple[Case, Lab] | None:
    """Plant an edit; return a case with a wrong output that the source gives right, and its lab."""
    root = plant(order, folder / "vllm")
    lab, sound = (Lab(source=one, device="cpu") for one in (root, Path(order["root"])))
    backend = find_backend("vllm", root, "cpu")
    for case in cases_of(backend, order):
        try:
            if lab.run(case).status == "mismatch" and sound.run(case).status == "match":
                return case, lab
        except AttnLabError:
            continue
    return None


def cases_of(backend: Backend, order: dict[str, Any]) -> list[Case]:
    """Return hostile cases of an op, in an order that the seed and the fault decide."""
    every = [
        case.replace(backend="vllm", trace_reads=False)
        for case in hostile_cases(backend, order["op"], "sm_90", DEFAULT_CASES, 0)
        if case.op_argument == NONE and sum(case.lengths.seq_lens) <= _MOST_TOKENS
    ]
    random.Random(f"{order['seed']} {order['text']}").shuffle(every)
    return every[:_MOST_CASES]


def wrong_catalogue_case(order: dict[str, Any], folder: Path) -> tuple[Case, Lab] | None:
    """Plant a defect in a kernel; return a random case in which it shows, and its lab."""
    rng, lab = random.Random(order["seed"]), Lab()
    for i in range(400):
        case = random_case(rng)
        if case.op == MERGE:
            continue
        problem = Problem.of_case(case, lab.batch(case), lab.call(case))
        if order["text"] not in [one.name for one in applicable(problem)]:
            continue
        file = folder / f"kernel_{i}.py"
        values = {"name": order["text"], "op": case.op, "platform": case.platform}
        file.write_text(_KERNEL.format(**values))
        try:
            case = case.replace(backend=f"{file}:kernel", num_blocks=None, max_blocks_per_seq=None)
            if lab.run(case).status == "mismatch":
                return case, lab
        except (InvalidCase, AttnLabError):
            continue
    return None


def print_summary(path: Path) -> None:
    """Print how many main claims are the same, and those that are not."""
    results = read(path)
    head = "| faults | wrong output seen | same main claim | that of the Case with another seed |"
    print(f"{head}\n| --- | --- | --- | --- |")
    for kind in ("source", "catalogue"):
        classes = Counter(one["class"] for one in results if one["kind"] == kind)
        seen = classes["same"] + classes["other"]
        others = [one for one in results if one["kind"] == kind and one["class"] == "other"]
        drawn = sum(one["claims"][1] in one["other_seeds"] for one in others)
        share = f"{classes['same']} ({classes['same'] / max(1, seen):.1%})"
        print(f"| {kind} | {seen} | {share} | {drawn} |")
    for one in results:
        if one["class"] == "other":
            print(f"\n{one['kind']} {one['op']}: {one['text']}\n  {one['case']}")
            print(f"  Case  {one['claims'][0]}\n  call  {one['claims'][1]}")
            print("\n".join(f"  seeds {text}" for text in one["other_seeds"]))
            print("\n".join(f"  unknown: {text}" for text in one["unknown"][1:]))
    print(dict(Counter(one.get("error", one["class"]) for one in results)))


if __name__ == "__main__":
    main()
