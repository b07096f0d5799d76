"""Measure how well a fault that is planted in a vLLM's Triton source is located in that source.

python tools/fault_lines.py --source WHEEL --op unified_attention --count 20 --seed 7 --out lines.jsonl
python tools/fault_lines.py --summary lines.jsonl

Each mutant of tools/source_mutation.py changes one expression. It counts if the output of a small case is
wrong while that of the unchanged op is right. The trial edits are of the same kinds as the mutations, so the
figures hold for faults of one expression, not for others.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import source_mutation
import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.ops import OPS, TRITON_OPS
from attnlab.diagnosis.kernel_lines import judge_of, locate_lines
from attnlab.diagnosis.kernel_trials import Limit
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab
from attnlab.weights.public import xray

FEATURES: tuple[dict[str, Any], ...] = (
    {}, {"sliding_window": 20}, {"alibi": True}, {"softcap": 5.0}, {"sinks": True},
    {"kv_cache_dtype": "fp8", "k_scale": 0.7, "v_scale": 0.37},
    {"num_splits": 4, "query_lens": (1, 1)},
)  # fmt: skip
RANKS = ("first", "in the first 3", "in the first 10", "later or not listed", "no line")


def main() -> None:
    """Locate mutants, or print the summary of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", action="append", type=Path, default=[], metavar="PATH")
    parser.add_argument("--op", action="append", choices=TRITON_OPS, help="repeatable")
    parser.add_argument("--count", type=int, default=20, help="mutants for each source and op")
    parser.add_argument("--seed", type=int, default=7, help="seed of the draw of mutants")
    parser.add_argument("--edits", type=int, default=1000, help="trial edits of a mutant, at most")
    parser.add_argument("--xray", action="store_true", help="use an X-ray of each mutant, too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="one JSON object a mutant")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the table of a file")
    args = parser.parse_args()
    if args.summary:
        print_summary(args.summary)
        return
    torch.set_num_threads(1)
    with args.out.open("a") as out:
        for source in map(find_source, args.source):
            for op in args.op or ("unified_attention", "chunked_prefill_paged_decode"):
                file = source.op_file(OPS[op].module)
                found = source_mutation.mutants(file.read_text())
                for mutant in source_mutation.sample(found, args.count, args.seed):
                    result = located(source, op, mutant, args)
                    out.write(json.dumps(result) + "\n")
                    out.flush()
                    print(f"{result['rank']:20} {result['text']}", file=sys.stderr)
    print_summary(args.out)


def located(
    source: Source, op: str, mutant: source_mutation.Mutant, args: argparse.Namespace
) -> dict[str, Any]:
    """Return where the planted line is in the ranking of a mutant; rank "not wrong" if no case shows it."""
    result = {"version": source.version, "op": op, "rule": mutant.rule, "text": mutant.text}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "vllm"
        shutil.copytree(source.root, root)
        file = root / source.op_file(OPS[op].module).relative_to(source.root)
        file.write_text(mutant.apply(file.read_text()))
        lab, sound = Lab(source=root, device="cpu"), Lab(source=source.path, device="cpu")
        for case in cases(op, source):
            try:
                if is_right(lab, case) or not is_right(sound, case):
                    continue
                began = time.process_time()
                found = xray(case, lab=lab, limit_s=3, confirm=False) if args.xray else None
                place = locate_lines(lab, case, found, Limit(edits=args.edits, seconds=60.0))
            except AttnLabError:
                continue
            lines = [one.line for one in place.lines]
            rank = RANKS[-1] if not lines else rank_of(lines, mutant)
            seconds = round(time.process_time() - began, 1)
            kinds = [one.evidence for one in place.lines[:1]]
            return {
                **result,
                "rank": rank,
                "evidence": kinds,
                "tried": place.tried,
                "seconds": seconds,
            }
    return {**result, "rank": "not wrong"}


def rank_of(lines: list[int], mutant: source_mutation.Mutant) -> str:
    """Return the rank of the planted line; a mutated expression may go on over further lines."""
    last = mutant.line + mutant.before.count("\n")
    ranks = [rank for rank, line in enumerate(lines, 1) if mutant.line <= line <= last]
    if not ranks or ranks[0] > 10:
        return RANKS[3]
    return RANKS[0] if ranks[0] == 1 else RANKS[1] if ranks[0] <= 3 else RANKS[2]


def is_right(lab: Lab, case: Case) -> bool:
    """Return whether the output of a case is right up to rounding."""
    return bool(judge_of(lab, case)(lab.output(case)).all())


def cases(op: str, source: Source) -> Iterator[Case]:
    """Yield small cases with different features."""
    is_decode = op == "decode_attention_fwd"
    for feature in FEATURES:
        fields: dict[str, Any] = {
            "op": op, "backend": "vllm", "release": source.rules, "platform": "sm_90",
            "num_heads": 2, "num_queries_per_kv": 2, "head_size": 32, "block_size": 16,
            "query_lens": (1, 1) if is_decode else (1, 7), "ctx_lens": (37, 20), "sm_scale": 0.2,
            "distribution": "normal", "empty_slots": "garbage", "output_init": "nan",
            "reference_dtype": "float64",
        }  # fmt: skip
        try:
            yield Case(**{**fields, **feature})
        except InvalidCase:
            continue


def print_summary(path: Path) -> None:
    """Print how often the planted line has which rank."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter(result["rank"] for result in results)
    wrong = len(results) - counts["not wrong"]
    print(f"| planted line | of {wrong} mutants with a wrong output |\n| --- | --- |")
    for rank in RANKS:
        print(f"| {rank} | {counts[rank]} |")


if __name__ == "__main__":
    main()
