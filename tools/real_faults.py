"""Measure how well `check` and the diagnosis work on faults that are planted in vLLM's own sources.

python tools/real_faults.py --source WHEEL --source WHEEL --count 30 --seed 7 --out faults.jsonl
python tools/real_faults.py --hip --source SDIST --count 20 --seed 7 --out faults.jsonl
python tools/real_faults.py --by-hand --source WHEEL --source WHEEL --out faults.jsonl
python tools/real_faults.py --source FOLDER --count 40 --faults new.json --limit-s 400 --out new.jsonl
python tools/real_faults.py --summary faults.jsonl

With --by-hand, the faults of docs/hand-faults.json are judged, in each source that has what they change. With
--faults, those of a JSON file are judged in addition to the drawn mutants: a list of objects with "name",
"op", "functions" and "changes", as in docs/hand-faults.json. Without --seed, the seed is the time in seconds;
it is printed and written. With --limit-s, no mutant begins after so many seconds.

With --except-seed and --except-file, a draw leaves out the mutants and faults by hand of earlier draws, on
which the diagnosis was developed. A draw that left out mutants itself is left out by its file.

Each mutant of tools/source_mutation.py changes one expression of a kernel. It runs the hostile cases of
`attnlab check` and is put into one of four classes:

- breaks: no case runs.
- no change seen: no hostile case gives a wrong output where the unchanged op is right, with the seed of the
  check or with another.
- missed: a case does, but the check finds nothing.
- found: the check finds it. Its first wrong output is diagnosed with the kernel at hand. A name, a rule, or a
  description of the weights is right if it gives the mutant's output on fresh cases wherever that is wrong. A
  description by a pattern is right if the same rule of places and contents holds there. A located access is
  right if the same source line makes it wherever a fresh output is wrong (tools/fault_verification.py). A
  repair, an edit of one expression, is right if the edited kernel is right on all fresh cases. The trial
  edits are of the same kinds as the mutations, so answers by a repair hold for faults of one expression.

The first sentence of a diagnosis is judged by its answer ("right", "wrong" or abstained), every further one
as in tools/fault_verification.py. Whatever is printed is written to a text file beside --out, for reading.

Of each wrong output of a Triton mutant, the place of the planted line among the located lines is recorded.

A fault that the unchanged op shows on the same case, in the same words, does not count.
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import source_mutation
import torch
from fault_verification import (
    SoundRuns,
    answer_of,
    judged_lines,
    repair_verdict,
)
from hand_faults import HAND_FAULTS, HandFault, NoPlace, read_faults
from mutant_process import error_of, run_judge

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase, Unavailable, Unsupported
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import OPS, TRITON_OPS
from attnlab.checker.case_check import check_case
from attnlab.checker.case_run import run_case
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import hostile_cases
from attnlab.contracts.dispatch import decide
from attnlab.diagnosis.decision import examine
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.trials import FULL
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend
from attnlab.kernels.triton.interpreter import limit_processes
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab
from attnlab.show import sheets

PLATFORMS = {"vllm": "sm_90", "rocm": "gfx942"}
HIP_OP, HIP_KERNEL = "chunked_prefill_paged_decode", "paged_attention_rocm"
HELPERS = "triton_attention_helpers.py"  # functions that the kernels of newer releases share
HIP_FILES = ("csrc/rocm/attention.cu", "csrc/rocm/attention_kernels.cuh")
LIMIT_S = 420.0  # processor time of a mutant
RANKS = ("first", "in the first 3", "in the first 10", "listed later", "not listed", "no line")


def main() -> None:
    """Judge the mutants, or print the summary of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", action="append", type=Path, default=[], metavar="PATH")
    parser.add_argument(
        "--hip", action="store_true", help="the ROCm kernel, on the emulated device"
    )
    parser.add_argument("--by-hand", action="store_true", help="faults written by hand")
    parser.add_argument(
        "--faults", type=Path, action="append", default=[], help="JSON file of faults; repeatable"
    )
    parser.add_argument(
        "--op", action="append", choices=TRITON_OPS, help="only this op; repeatable"
    )
    parser.add_argument("--count", type=int, default=30, help="mutants for each source")
    parser.add_argument("--seed", type=int, help="of the draw of mutants; default: the time")
    parser.add_argument(
        "--except-seed", type=int, action="append", default=[], help="leave out what it draws"
    )
    parser.add_argument(
        "--except-file", type=Path, action="append", default=[], help="leave out its mutants, too"
    )
    parser.add_argument(
        "--workers", "--processes", dest="processes", type=int, default=os.cpu_count() or 1
    )
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no mutant after this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="one JSON object a mutant")
    parser.add_argument(
        "--sound-folder", type=Path, help="keeps what the unchanged ops do, for further draws"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the table of a file")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sound", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sound:
        save_sound(args.sound)
    elif args.judge:
        print(json.dumps(judge(json.loads(args.judge.read_text()))))
    elif args.summary:
        print_summary(args.summary)
    else:
        run_all(args)


def run_all(args: argparse.Namespace) -> None:
    """Judge the mutants of every source, a process each, and append the results to the file."""
    began = time.perf_counter()
    args.seed = int(time.time()) if args.seed is None else args.seed
    by_hand = [fault for file in args.faults for fault in read_faults(file)]
    by_hand += HAND_FAULTS if args.by_hand else ()
    print(f"seed {args.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as threads:
        ops = [HIP_OP] if args.hip else args.op or list(TRITON_OPS)
        name = "rocm" if args.hip else "vllm"
        plans = [
            (source, op)
            for source in map(find_source, args.source)
            for op in ops
            if has_op(source, op)
        ]
        kept = args.sound_folder or Path(folder)
        files = [kept / f"{source.version}-{name}-{op}.pt" for source, op in plans]
        list(threads.map(lambda plan, file: sound_in_process(*plan, name, file), plans, files))
        each = -(-args.count // len(ops))
        orders = [
            order
            for (source, op), file in zip(plans, files, strict=True)
            for order in (
                *order_by_hand(by_hand, source, op, args, file, Path(folder)),
                *(
                    ()
                    if args.by_hand
                    else order_mutants(source, name, op, each, args, file, Path(folder))
                ),
            )
        ]
        random.Random(args.seed).shuffle(orders)  # so that a run that is stopped has a fair sample
        texts = args.out.with_suffix(".txt")
        with args.out.open("a") as out, texts.open("a") as text:
            end = began + args.limit_s
            jobs = [threads.submit(judge_in_process, order, end) for order in orders]
            for i, result in enumerate((job.result() for job in as_completed(jobs)), 1):
                if result is None:
                    continue
                text.write(readable(result))
                text.flush()
                out.write(json.dumps({"seed": args.seed, **result}) + "\n")
                out.flush()
                print(f"{i}/{len(orders)} {result['class']:15} {result['text']}", file=sys.stderr)
    print(f"{len(orders)} mutants in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print_summary(args.out)


def has_op(source: Source, op: str) -> bool:
    """Answer whether a release has an op; 0.11.2 has none for encoders, for example."""
    try:
        return op == HIP_OP or source.op_file(OPS[op].module).is_file()
    except Unsupported:
        return False


def sound_in_process(source: Source, op: str, name: str, file: Path) -> None:
    """Save what the unchanged op does on all cases, in a process of its own."""
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    order = file.with_suffix(".order")
    order.write_text(json.dumps({"path": str(source.path), "op": op, "backend": name}))
    subprocess.run([sys.executable, __file__, "--sound", str(order)], check=True)


def order_mutants(
    source: Source,
    backend: str,
    op: str,
    count: int,
    args: argparse.Namespace,
    sound: Path,
    folder: Path,
) -> Iterator[Path]:
    """Write one file with the order of each drawn mutant into a folder; yield the files."""
    file = mutated_file(source, backend, op)
    find = source_mutation.mutants if backend == "vllm" else source_mutation.hip_mutants
    every = find(file.read_text())
    seen = {one for seed in args.except_seed for one in source_mutation.sample(every, count, seed)}
    known = judged_before(args.except_file)
    left = [
        one
        for one in every
        if one not in seen and (source.version, f"{file.name} {one.text}") not in known
    ]
    for i, mutant in enumerate(source_mutation.sample(left, count, args.seed)):
        order = {
            "root": str(source.root),
            "version": source.version,
            "backend": backend,
            "op": op if backend == "vllm" else HIP_KERNEL,
            "file": str(file.relative_to(source.root)),
            "text": f"{file.name} {mutant.text}",
            "mutant": dataclasses.asdict(mutant),
            "sound": str(sound),
        }
        path = folder / f"{sound.stem}-{i}.json"
        path.write_text(json.dumps(order))
        yield path


def order_by_hand(
    faults: Sequence[HandFault],
    source: Source,
    op: str,
    args: argparse.Namespace,
    sound: Path,
    folder: Path,
) -> Iterator[Path]:
    """Write one file with the order of each fault that was written by hand for an op; yield the files."""
    known = {text for _, text in judged_before(args.except_file)}  # in any version
    faults = [one for one in faults if one.name not in known]
    if not faults:
        return
    own = mutated_file(source, "vllm", op)
    files = [own, *own.parent.glob(HELPERS)]
    for i, fault in enumerate(faults):
        for file in files if fault.op == op else ():
            try:
                lines = fault.lines(file.read_text())
            except NoPlace:
                continue  # the release has other code
            order = {
                "root": str(source.root),
                "version": source.version,
                "backend": "vllm",
                "op": op,
                "file": str(file.relative_to(source.root)),
                "text": fault.name,
                "mutant": {"rule": "by hand", "line": lines[0]},
                "by_hand": dataclasses.asdict(fault),
                "sound": str(sound),
            }
            path = folder / f"{sound.stem}-hand-{i}.json"
            path.write_text(json.dumps(order))
            yield path
            break


def judged_before(files: Sequence[Path]) -> set[tuple[str, str]]:
    """Return the versions and texts of mutants in files.

    A file has one JSON object a line, or is docs/real-faults.json or docs/held-out-faults.json.
    """
    found = []
    for file in files:
        text = file.read_text()
        if file.suffix == ".jsonl":
            found += [json.loads(line) for line in text.splitlines()]
        else:
            record = json.loads(text)
            draws = record.get("draws") or (record, record["hip"])
            found += [one for draw in draws for one in draw["mutants"]]
            found += record.get("left_out", [])
    return {(one["version"], one["text"]) for one in found}


def mutated_file(source: Source, backend: str, op: str) -> Path:
    """Return the file whose kernels are mutated."""
    if backend == "vllm":
        return source.op_file(OPS[op].module)
    files = [source.root / name for name in HIP_FILES]
    return next(file for file in files if file.is_file() and "__HIP__GFX9__" in file.read_text())


def judge_in_process(path: Path, end: float = float("inf")) -> dict[str, Any] | None:
    """Judge one mutant in a process of its own; a process that fails or hangs is a finding.

    None after the time ``end``.
    """
    if time.perf_counter() > end:
        return None
    order = json.loads(path.read_text())
    done = run_judge(__file__, path, LIMIT_S)
    if done is None:
        return {**described(order), "class": "found", "kind": "does not end"}
    if done.returncode < 0:  # a signal: `attnlab check`, which runs kernels in a worker, reports it
        return {
            **described(order),
            "class": "found",
            "kind": f"ends with signal {-done.returncode}",
        }
    if done.returncode:
        return {**described(order), "class": "error", "error": error_of(done)}
    return json.loads(done.stdout)


def described(order: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies a mutant in the results."""
    mutant = order["mutant"]
    names = ("version", "op", "text")
    return {**{name: order[name] for name in names}, "rule": mutant["rule"], "line": mutant["line"]}


def processor_s() -> float:
    """Return the processor time of this process and of the children that ended, in seconds."""
    return sum(os.times()[:4])


def judge(order: dict[str, Any]) -> dict[str, Any]:
    """Return the class of a mutant and, if it is found, what the diagnosis says and whether it is right."""
    torch.set_num_threads(1)
    limit_processes(1)  # other mutants use the other cores
    began = processor_s()
    with tempfile.TemporaryDirectory() as folder:
        root = plant(order, Path(folder) / "vllm")
        os.environ["ATTNLAB_CACHE"] = str(Path(folder) / "cache")  # a mutant is built once
        backend = find_backend(order["backend"], root, "cpu")
        result = classify(order, backend, Lab(source=root, device="cpu"), root)
        if "located" in result:
            result |= place_of(order, root, result.pop("located"))
    return {**described(order), **result, "seconds": round(processor_s() - began, 1)}


def plant(order: dict[str, Any], folder: Path) -> Path:
    """Copy a source, with the mutant in it, into a folder."""
    shutil.copytree(order["root"], folder)
    file = folder / order["file"]
    fault = HandFault.from_dict(order["by_hand"]) if "by_hand" in order else None
    change = fault or source_mutation.Mutant(**order["mutant"])
    file.write_text(change.apply(file.read_text()))
    return folder


def classify(order: dict[str, Any], backend: Backend, lab: Lab, root: Path) -> dict[str, Any]:
    """Run the hostile cases, then further ones, until one output differs from the sound one."""
    sound = torch.load(order["sound"], weights_only=True)
    began, changed, missed, ran = processor_s(), 0, [], 0
    cases, num_checked = [Case.from_json(one) for one in sound["cases"]], len(sound["faults"])
    for i, (case, expected) in enumerate(zip(cases, sound["outputs"], strict=True)):
        if i >= num_checked and (missed or not ran):
            break
        got = observe(lab, backend, case)
        if got is None or isinstance(expected, str) or expected is None:
            continue
        ran += not isinstance(got, str)
        if not same(got, expected):
            changed += 1
            known = sound["faults"][i] if i < num_checked else []
            if i < num_checked and (faults := faults_of(lab, backend, case, known)):
                runs = list(zip(cases, sound["outputs"], strict=True))[:num_checked]
                faults["check_s"] = round(processor_s() - began, 1)
                labs = (lab, Lab(source=order["root"], device="cpu"))
                said = named(labs, backend, case, runs, partial(is_planted, order, root))
                return {"class": "found", "case": i, **faults, **said}
            if is_new_error(lab, backend, case, got, expected):
                missed.append((i, case))
    if not ran:
        return {"class": "breaks"}
    if not missed:
        return {"class": "no change seen", "rounding": changed}
    return {"class": "missed", "case": missed[0][0], "run": missed[0][1].to_cli()}


def checked_cases(backend: Backend, op: str) -> list[Case]:
    """Return the hostile cases of the check, with those that pass further arguments of an op."""
    return list(hostile_cases(backend, op, PLATFORMS[backend.name], None, 0))


def all_cases(backend: Backend, op: str) -> list[Case]:
    """Return the hostile cases of the check, then those with another seed."""
    return [
        *checked_cases(backend, op),
        *hostile_cases(backend, op, PLATFORMS[backend.name], None, 1),
    ]


Observed = tuple[torch.Tensor | None, ...] | str | None


def observe(lab: Lab, backend: Backend, case: Case) -> Observed:
    """Return the outputs of a case, the text of its failure, or None if it cannot run here."""
    try:
        if backend.name == "rocm" and HIP_KERNEL not in decide(case).kernels:
            return None
        run = run_case(lab, backend, case)
    except (Unavailable, InvalidCase):
        return None
    except AttnLabError as error:
        return str(error)
    outputs = (run.output, run.lse, run.padded)
    return tuple(None if one is None else one.clone() for one in outputs)  # views of large buffers


def save_sound(order: Path) -> None:
    """Save the outputs of the unchanged op on all cases, and its own faults on those of the check."""
    torch.set_num_threads(1)
    given = json.loads(order.read_text())
    backend = find_backend(given["backend"], given["path"], "cpu")
    lab = Lab(source=given["path"], device="cpu", keep=3)
    cases = all_cases(backend, given["op"])
    num_checked = len(checked_cases(backend, given["op"]))
    sound = {
        "cases": [case.to_json() for case in cases],  # a mutant's process need not make them again
        "outputs": [observe(lab, backend, case) for case in cases],
        "faults": [faults_known(lab, backend, case) for case in cases[:num_checked]],
    }
    torch.save(sound, order.with_suffix(".pt"))


def faults_known(lab: Lab, backend: Backend, case: Case) -> list[str]:
    """Return the faults that the check reports of a case, in words; none if it cannot run."""
    try:
        return [in_words(found) for found in check_case(lab, backend, case) if found.is_fault]
    except AttnLabError:
        return []


def same(got: Observed, expected: Observed) -> bool:
    """Return whether two runs have the same bits; NaN equals NaN."""
    if isinstance(got, str) or isinstance(expected, str) or got is None or expected is None:
        return got == expected
    return all(
        (a is None and b is None) or (a is not None and b is not None and bits_equal(a, b))
        for a, b in zip(got, expected, strict=True)
    )


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    a, b = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (a, b))
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def in_words(finding: Finding) -> str:
    """Return what is equal for findings of one fault."""
    return f"{finding.kind}: {finding.diagnosis}"


def faults_of(lab: Lab, backend: Backend, case: Case, known: Sequence[str] = ()) -> dict[str, Any]:
    """Return the first fault that the check reports of a case, except ``known`` ones; {} if none."""
    found = [finding for finding in check_case(lab, backend, case) if finding.is_fault]
    new = [finding for finding in found if in_words(finding) not in known]
    return {"kind": new[0].kind, "label": new[0].diagnosis} if new else {}


def is_new_error(
    lab: Lab, backend: Backend, case: Case, got: Observed, expected: tuple[torch.Tensor | None, ...]
) -> bool:
    """Return whether a run is wrong by more than rounding where the unchanged op is right."""
    if not isinstance(got, tuple):
        return True
    if case.spec.writes_cache:
        return bool(faults_of(lab, backend, case))
    is_wrong = [
        examine(lab, case, one[0], ()).evidence.locations.is_wrong
        for one in (got, expected)
        if one[0] is not None
    ]
    return bool((is_wrong[0] & ~is_wrong[-1]).any())


def named(
    labs: tuple[Lab, Lab],
    backend: Backend,
    case: Case,
    sound: SoundRuns,
    planted: Callable[[str, int], bool],
) -> dict[str, Any]:
    """Diagnose the wrong output of a case, and verify the statements on fresh cases.

    ``labs``: with the mutant, and with the unchanged op.
    """
    lab, unchanged = labs
    if case.spec.writes_cache:
        return {"answer": "not an attention op"}
    case = case.replace(backend=backend.name)
    try:
        began = processor_s()
        diagnosis = diagnose(case, lab=lab, propose=False, limit=FULL)
        ended = processor_s()
        if diagnosis.status == "rejected":
            return {"answer": "fails", "error": diagnosis.rejection}
        answer = of_argument if case.op_argument != NONE else answer_of
        found = answer(lab, backend, case, diagnosis, unchanged)
        if diagnosis.is_by_repair and diagnosis.repair is not None:
            what = repair_verdict(lab, diagnosis.repair, sound, planted)
            found["repair_is"] = what
            verdict = "wrong" if what == "misleading" else "right"
            found["answer"] = f"described by a repair, {verdict}"
        found["lines"] = judged_lines(lab, backend, case, diagnosis, sound, planted)
        found["printed"] = sheets.plain(diagnosis)
    except AttnLabError as error:
        return {"answer": "fails", "error": str(error)}
    found |= {
        "repair": None if diagnosis.repair is None else diagnosis.repair.text,
        "diagnosis_s": round(ended - began, 1),
        "judge_s": round(processor_s() - ended, 1),
    }
    if backend.name == "vllm" and diagnosis.location is not None:  # lines of C++ are not located
        found["located"] = [[one.file, one.line] for one in diagnosis.locations]
    return found


def of_argument(
    lab: Lab, backend: Backend, case: Case, diagnosis: Diagnosis, unchanged: Lab
) -> dict[str, Any]:
    """Return the answer for a Case with an op argument.

    If the output is wrong without the argument, too, the diagnosis is about that output.
    """
    plain = case.replace(op_argument=NONE)
    if diagnose(plain, lab=lab, defects=(), propose=False, limit=None).is_wrong:
        return answer_of(lab, backend, plain, diagnosis, unchanged)
    return answer_of(lab, backend, case, diagnosis, unchanged)


def readable(result: dict[str, Any]) -> str:
    """Return a mutant with everything that is printed about it, and the verdicts, for a person."""
    head = f"{result['version']} {result['op']}: {result['text']}"
    verdicts = [f"  {one['verdict']}: {one['sentence']}" for one in result.get("lines", ())]
    parts = [f"=== {head}", f"{result['class']}: {result.get('answer', '')}"]
    return "\n".join([*parts, result.get("printed", ""), *verdicts, "", ""])


def is_planted(order: dict[str, Any], root: Path, of: str, line: int) -> bool:
    """Answer whether a line of a file is in the statement of a planted line."""
    return place_of(order, root, [[of, line]])["at"] is not None


def place_of(order: dict[str, Any], root: Path, located: list[list[Any]]) -> dict[str, Any]:
    """Return where the first of the planted lines is among the located lines, [[file, line], ...]."""
    file = root / order["file"]
    planted = [order["mutant"]["line"]]
    if "by_hand" in order:
        original = Path(order["root"]) / order["file"]
        planted = HandFault.from_dict(order["by_hand"]).lines(original.read_text())
    lines = [line if Path(of) == file else 0 for of, line in located]
    found = [rank_of(lines, file.read_text(), line) for line in planted]
    at = min((one for one in found if one is not None), default=None)
    return {"rank": rank_name(at, len(lines)), "at": at, "located_lines": lines}


def enclosing_statement(text: str, line: int) -> range:
    """Return the lines of the innermost statement of a module at a line; of a block, those of its head."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if line <= last:
                found = range(node.lineno, max(last, node.lineno) + 1)
    return found


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
    """Print the table of classes and answers."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    classes = Counter(result["class"] for result in results)
    answers = Counter(
        result.get("answer", "no output") for result in results if result["class"] == "found"
    )
    live = classes["found"] + classes["missed"]
    print("| what | number |\n| --- | --- |")
    for name, number in [("mutants", len(results)), *classes.most_common()]:
        print(f"| {name} | {number} |")
    print(f"| found of those that change an output | {classes['found']} of {live} |")
    for name, number in answers.most_common():
        print(f"| found, {name} | {number} |")
    print_statements(results)
    print_seconds(results)
    ranks = Counter(result["rank"] for result in results if "rank" in result)
    print(f"\n| planted line | of {sum(ranks.values())} wrong outputs |\n| --- | --- |")
    for name in RANKS:
        print(f"| {name} | {ranks[name]} |")


def print_seconds(results: Sequence[dict[str, Any]]) -> None:
    """Print the mean processor time of the parts of judging a wrong output, and of a mutant."""
    for name in ("check_s", "diagnosis_s", "judge_s", "seconds"):
        given = [one[name] for one in results if name in one]
        if given:
            print(f"{name}: {sum(given) / len(given):.1f} on average of {len(given)}")


def print_statements(results: Sequence[dict[str, Any]]) -> None:
    """Print how many first statements and further lines are right, misleading or neither."""
    wrong = [one for one in results if "said" in one]
    first = Counter(
        "misleading"
        if one["answer"].endswith("wrong")
        else "abstained"
        if one["answer"] == "abstained"
        else "right"
        for one in wrong
    )
    further = Counter(line["verdict"] for one in wrong for line in one.get("lines", ()))
    for title, counts in (("first statements", first), ("further lines", further)):
        total = sum(counts.values())
        print(f"\n| {title} | of {total} | share |\n| --- | --- | --- |")
        for name, number in counts.most_common():
            print(f"| {name} | {number} | {number / total:.1%} |")
    repairs = Counter(one["repair_is"] for one in wrong if "repair_is" in one)
    print(f"\nstated repairs: {dict(repairs)}")


if __name__ == "__main__":
    main()
