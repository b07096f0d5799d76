"""Run vLLM's own attention tests, unmodified, under ``pytest --attnlab`` on a GPU.

python tools/vllm_tests.py --wheel vllm-0.33.0-….whl --sdist vllm-0.33.0.tar.gz --out FILE.json
python tools/vllm_tests.py --summary FILE.json

The test files come from the sdist and vLLM's Python files from the wheel; both are unpacked into a temporary
folder. tools/vllm_tests_plugin.py replaces vLLM's top conftest.py and its compiled extension. The parts:

- sound: the tests on vLLM's kernels as released.
- overhead: each test alternately without and with the plugin, in one process, after a first run of it
  in both ways.
- power: which defects the passing tests would not notice (--attnlab-power).
- faults: one expression of a kernel is changed (tools/source_mutation.py) in a copy of its file. The tests of
  that file run without the plugin, then up to three failing ones with it. Each report is judged:

  - named rightly: the named defect explains the output, too, when the test draws other data, and on six
    fresh cases of ``attnlab check`` wherever they are wrong. One of both must be wrong at all.
  - described: no name, but rules that reproduce the output; rightly if rules of the same kinds result with
    other data.
  - abstained: neither. wrong: a name or a shortlist that does not hold, or a side that is not the kernel's.
  - no known op: the test called no op that is recorded, such as a kernel itself, so there is no report.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import real_faults
import source_mutation
from fault_verification import fresh_cases
from vllm_tests_plugin import LOST

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.checker.case_run import run_case
from attnlab.defects import DEFECTS
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import find_backend
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab

ROOT = Path(__file__).parents[1]
PARTS = ("sound", "overhead", "power", "faults")
TEST_FOLDER = "tests/kernels/attention"
TEST_FILES = (
    "test_prefix_prefill.py",
    "test_triton_unified_attention.py",
    "test_triton_decode_attention.py",
    "test_merge_attn_states.py",
)
# The files that are mutated, how often in a round of the draw, and the tests of each.
MUTATED = (
    ("triton_unified_attention.py", 3, TEST_FILES[1]),
    ("triton_attention_helpers.py", 2, TEST_FILES[1]),
    ("triton_decode_attention.py", 2, TEST_FILES[2]),
    ("chunked_prefill_paged_decode.py", 2, TEST_FILES[0]),
    ("prefix_prefill.py", 1, TEST_FILES[0]),
)
SAMPLED = 3  # failing tests with a report per fault
OTHER_DATA = 911  # added to the seed of a test for the second judgement
RUN_LIMIT_S = 240.0
NOT_OF_THE_FAULT = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where everything is: ``folder`` has vLLM's tests, ``site`` its Python files."""

    folder: Path
    site: Path
    source: Source
    per_test: int
    seed: int
    processes: int
    failures: Path

    def file(self, name: str) -> str:
        """Return the path of a test file from the folder."""
        return f"{TEST_FOLDER}/{name}"

    def pytest(
        self,
        name: str,
        files: Iterable[str],
        *words: str,
        limit_s: float | None = None,
        threads: int = 1,
    ) -> list[dict[str, Any]]:
        """Run pytest on test files; return the records of the tests. ``name`` names the run."""
        records = self.folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_tests_plugin"]
        command += [*plugin_words(words), f"--records={records}", "-p", "no:cacheprovider", *words]
        paths = [str(self.site), str(ROOT / "tools"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        with (self.folder / f"{name}.log").open("w") as log:
            try:
                subprocess.run(
                    [*command, *map(self.file, files)],
                    cwd=self.folder,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                log.write("\nstopped at the time limit\n")
        if not records.is_file():
            return []
        return [json.loads(line) for line in records.read_text().splitlines()]

    @property
    def drawn(self) -> tuple[str, ...]:
        """Return the options that draw the sample."""
        return f"--per-test={self.per_test}", f"--draw={self.seed}"


def plugin_words(words: Sequence[str]) -> list[str]:
    """Return how to load attnlab's plugin if an option of it is among the words and it is not installed."""
    from importlib.metadata import entry_points

    needed = any(word.startswith("--attnlab") for word in words)
    installed = list(entry_points(group="pytest11", name="attnlab"))
    return ["-p", "attnlab.recorder.pytest_plugin"] if needed and not installed else []


def main() -> int:
    """Run the parts and write the document, or print the summary of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="a wheel of vLLM")
    parser.add_argument("--sdist", type=Path, help="the sdist of the same release")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; default: all")
    parser.add_argument("--per-test", type=int, default=4, help="ids of each test function")
    parser.add_argument("--seed", type=int, default=14, help="of the draws of ids and of mutants")
    parser.add_argument("--rounds", type=int, default=4, help="even: of the overhead")
    parser.add_argument("--count", type=int, default=60, help="planted faults at most")
    parser.add_argument(
        "--number",
        type=int,
        action="append",
        help="plant the fault with this number of the draw; repeatable; default: all",
    )
    parser.add_argument(
        "--file", action="append", choices=TEST_FILES, help="measure the overhead on this file only"
    )
    parser.add_argument("--limit-s", type=float, default=3600.0, help="start no fault after this")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument(
        "--sound", type=Path, help="a file with the part sound: tests that fail there say nothing"
    )
    parser.add_argument("--logs", type=Path, help="write pytest's output of all runs to this file")
    parser.add_argument("--failures", type=Path, help="keep saved calls and pages in this folder")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the tables of a file")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.judge:
        print(json.dumps(judge_names(json.loads(args.judge.read_text()))))
        return 0
    if args.summary:
        print(summary(json.loads(args.summary.read_text())))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        setup = prepare(args, Path(folder))
        document = facts(setup)
        for part in args.part or PARTS:
            began = time.perf_counter()
            document[part] = RUN[part](setup, args)
            document[part]["seconds"] = round(time.perf_counter() - began, 1)
            args.out.write_text(json.dumps(document, indent=1) + "\n")
            print(f"{part}: {document[part]['seconds']} s", file=sys.stderr, flush=True)
        if args.logs:
            texts = (
                f"== {log.name}\n{log.read_text()}" for log in sorted(setup.folder.glob("*.log"))
            )
            args.logs.write_text("\n".join(texts))
    print(summary(document))
    return 0


def prepare(args: argparse.Namespace, folder: Path) -> Setup:
    """Unpack vLLM's tests and Python files into a folder."""
    run, site = folder / "run", folder / "site"
    run.mkdir()
    with tarfile.open(args.sdist) as archive:
        for member in archive:
            inner = member.name.partition("/")[2]
            names = {f"{TEST_FOLDER}/{name}" for name in (*TEST_FILES, "conftest.py")}
            if inner in names | {"tests/kernels/conftest.py"}:
                target = run / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
    (run / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    with zipfile.ZipFile(args.wheel) as wheel:
        wheel.extractall(
            site, [n for n in wheel.namelist() if re.match(r"vllm/.*\.py$|vllm-[^/]*/METADATA$", n)]
        )
    return Setup(
        folder=run,
        site=site,
        source=find_source(args.wheel),
        per_test=args.per_test,
        seed=args.seed,
        processes=args.processes,
        failures=(args.failures or folder / "failures").absolute(),
    )


def facts(setup: Setup) -> dict[str, Any]:
    """Return what identifies the run."""
    import torch
    import triton

    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "vllm": setup.source.version,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "command": " ".join(
            Path(word).name if os.sep in word else word for word in ["python", *sys.argv]
        ),
        "seed": setup.seed,
        "per_test": setup.per_test,
    }


# Sound kernels.


def run_sound(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Run the sample with the plugin on vLLM's kernels as released."""
    records = setup.pytest("sound", TEST_FILES, "--attnlab", *setup.drawn, *parallel(setup))
    outcomes = Counter((file_of(one), one["outcome"]) for one in records)
    return {
        "tests": {
            name: {what: outcomes[name, what] for what in ("passed", "failed", "skipped")}
            for name in TEST_FILES
        },
        "reports": [one for one in records if reported(one)],
        "failed": [one for one in records if one["outcome"] == "failed" and not reported(one)],
        "skipped": dict(Counter(one["error"] for one in records if one["outcome"] == "skipped")),
    }


def parallel(setup: Setup) -> list[str]:
    """Return the options that run tests in several processes, at most six on the GPU."""
    return ["-n", str(min(6, setup.processes))] if setup.processes > 1 else []


def file_of(record: dict[str, Any]) -> str:
    """Return the test file of a record."""
    return Path(record["id"].partition("::")[0]).name


def reported(record: dict[str, Any]) -> bool:
    """Answer whether attnlab added a section to a test's report."""
    return "attnlab_op" in record["properties"]


# Overhead.


def run_overhead(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Run each test alternately without and with the plugin, in one process."""
    words = ("--attnlab", f"--rounds={args.rounds}", *setup.drawn)
    if args.sound is not None:
        left_out = setup.folder / "failing.ids"
        left_out.write_text("\n".join(failing_when_sound(setup, args.sound)))
        words = (*words, f"--except-ids={left_out}")
    records = setup.pytest(
        "overhead", args.file or TEST_FILES, *words, threads=4, limit_s=RUN_LIMIT_S
    )
    by_id: dict[str, list[dict[str, Any]]] = {}
    for one in records:
        if one["is_timed"] and one["outcome"] == "passed":
            by_id.setdefault(one["id"], []).append(one)
    tests = [paired(name, ones) for name, ones in by_id.items()]
    tests = [one for one in tests if one]
    groups = {name: [one for one in tests if file_of(one) == name] for name in TEST_FILES}
    totals = {name: total(ones) for name, ones in groups.items() if ones}
    return {"rounds": args.rounds, "files": totals, "all": total(tests), "tests": tests}


def paired(name: str, ones: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a test's medians without and with the plugin; {} unless it ran both ways."""
    both = {on: [one for one in ones if one["with"] is on] for on in (False, True)}
    if not both[False] or not both[True]:
        return {}
    return {
        "id": name,
        "calls": max(one["calls"] for one in both[True]),
        "without_s": statistics.median(one["seconds"] for one in both[False]),
        "with_s": statistics.median(one["seconds"] for one in both[True]),
        "without_mib": round(max(one["peak"] for one in both[False]) / 2**20, 1),
        "with_mib": round(max(one["peak"] for one in both[True]) / 2**20, 1),
    }


def total(tests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of times, their ratio, and the largest peaks of memory."""
    without, given = (sum(one[name] for one in tests) for name in ("without_s", "with_s"))
    return {
        "tests": len(tests),
        "with_calls": sum(one["calls"] > 0 for one in tests),
        "without_s": round(without, 3),
        "with_s": round(given, 3),
        "overhead": round(given / without - 1, 4) if without else None,
        "without_mib": max((one["without_mib"] for one in tests), default=0),
        "with_mib": max((one["with_mib"] for one in tests), default=0),
    }


# Power.


def run_power(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Score the tests of the sample."""
    target = setup.folder / "power.json"
    words = (f"--attnlab-power-json={target}", *setup.drawn)
    workers = ["-n", str(setup.processes)] if setup.processes > 1 else []
    setup.pytest("power", TEST_FILES[:3], *words, *workers, limit_s=RUN_LIMIT_S)
    return {"tests": json.loads(target.read_text()) if target.is_file() else []}


# Faults.


def run_faults(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Plant one fault after the other, several at a time, until the time is over."""
    began = time.perf_counter()
    drawn = draw(setup.source, args.count, setup.seed)
    chosen = [(number, drawn[number]) for number in args.number or range(len(drawn))]
    known = failing_when_sound(setup, args.sound)

    def one(numbered: tuple[int, Fault]) -> dict[str, Any] | None:
        if time.perf_counter() - began > args.limit_s:
            return None
        number, fault = numbered
        result = try_fault(setup, fault, number, known)
        print(f"{number} {result['class']:12} {result['text']}", file=sys.stderr, flush=True)
        with args.out.with_suffix(".jsonl").open("a") as lines:  # survives the end of a time limit
            lines.write(json.dumps(result) + "\n")
        return result

    with ThreadPoolExecutor(setup.processes) as threads:
        done = [result for result in threads.map(one, chosen) if result]
    return {"drawn": len(chosen), "faults": done}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A mutant of a file, and the tests that run on it."""

    file: str
    tests: str
    mutant: source_mutation.Mutant


def draw(source: Source, count: int, seed: int) -> list[Fault]:
    """Draw mutants of every file in turn, by MUTATED's weights."""
    pools = {}
    for name, _, tests in MUTATED:
        found = source_mutation.mutants(source.op_file(name.removesuffix(".py")).read_text())
        chosen = source_mutation.sample(found, count, seed)
        pools[name] = [Fault(file=name, tests=tests, mutant=one) for one in chosen]
    drawn: list[Fault] = []
    while len(drawn) < count and any(pools.values()):
        for name, weight, _ in MUTATED:
            drawn += pools[name][:weight]
            pools[name] = pools[name][weight:]
    return drawn[:count]


def failing_when_sound(setup: Setup, file: Path | None) -> set[str]:
    """Return the ids of the sample that fail on vLLM's kernels as released."""
    if file is not None:
        part = json.loads(file.read_text())["sound"]
        return {one["id"] for one in [*part["reports"], *part["failed"]]}
    records = setup.pytest("known", TEST_FILES, *setup.drawn, *parallel(setup))
    return {one["id"] for one in records if one["outcome"] == "failed"}


def try_fault(setup: Setup, fault: Fault, number: int, known: set[str]) -> dict[str, Any]:
    """Run the tests on one fault, then some failing ones with the plugin, and judge the reports."""
    began = time.perf_counter()
    root = setup.folder.parent / f"fault{number}"
    op_file = setup.source.op_file(fault.file.removesuffix(".py"))
    order = {
        "root": str(setup.source.root),
        "file": str(op_file.relative_to(setup.source.root)),
        "mutant": dataclasses.asdict(fault.mutant),
    }
    real_faults.plant(order, root)
    folder = (root / order["file"]).parent
    words = (f"--ops-folder={folder}", *setup.drawn)
    records = setup.pytest(f"fault{number}", [fault.tests], *words, limit_s=RUN_LIMIT_S)
    records = [one for one in records if one["id"] not in known]
    result = {"number": number, "text": f"{fault.file} {fault.mutant.text}", **counted(records)}
    failing = [one["id"] for one in records if counts(one)]
    result["failing"] = failing
    if result["class"] == "noticed":
        result["reports"] = reports_of(setup, number, fault, root, folder, spread(failing))
    return {**result, "seconds": round(time.perf_counter() - began, 1)}


def counts(record: dict[str, Any]) -> bool:
    """Answer whether a test failed because of the fault."""
    return record["outcome"] == "failed" and NOT_OF_THE_FAULT not in record["error"]


def counted(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the class of a fault, and how many tests ran and failed."""
    failing = [one for one in records if counts(one)]
    ran = [one for one in records if one["outcome"] != "skipped"]
    compiles = ("CompilationError", "NameError", "TypeError", "UnsupportedLanguageConstruct")
    kinds = {
        "did not run": not ran,
        "not noticed": not failing,
        "breaks": bool(failing)
        and all(any(w in one["error"] for w in compiles) for one in failing),
    }
    return {
        "class": next((name for name, holds in kinds.items() if holds), "noticed"),
        "ran": len(ran),
        "failed": len(failing),
        "error": failing[0]["error"][:200] if failing else "",
    }


def spread(ids: Sequence[str]) -> list[str]:
    """Return up to SAMPLED ids, of different test functions first."""
    by_test: dict[str, list[str]] = {}
    for one in ids:
        by_test.setdefault(one.partition("[")[0], []).append(one)
    order = [group[i] for i in range(len(ids)) for group in by_test.values() if i < len(group)]
    return order[:SAMPLED]


def reports_of(
    setup: Setup, number: int, fault: Fault, root: Path, folder: Path, ids: Sequence[str]
) -> list[dict[str, Any]]:
    """Run failing tests with the plugin, on their own data and on other, and judge what it reports."""
    words = (f"--ops-folder={folder}", f"--data-seeds=0,{OTHER_DATA}")
    own: dict[str, dict[str, Any]] = {}
    other: dict[str, dict[str, Any]] = {}
    for i, group in enumerate([ids, *([one] for one in ids)]):
        left = [one for one in group if one not in own or is_lost(own[one])]
        if not left:
            continue
        again = ("--attnlab-host",) if i else ()  # a fault had broken the GPU's context
        for one in reported_run(setup, f"{number}-{i}", fault, left, (*words, *again)):
            if one["outcome"] == "failed":
                (own if one["data_seed"] == 0 else other)[one["id"]] = one
    found = [judged(own[one], other.get(one)) for one in ids if one in own]
    found += [
        {"id": one, "answer": "no report", "why": "not run or passed"}
        for one in ids
        if one not in own
    ]
    return verified(setup, number, root, found)


def is_lost(record: dict[str, Any]) -> bool:
    """Answer whether a test has broken the GPU's context."""
    return any(word in record["error"] for word in LOST)


def reported_run(
    setup: Setup, name: str, fault: Fault, ids: Sequence[str], words: Sequence[str]
) -> list[dict[str, Any]]:
    """Run tests with the plugin; return their records."""
    chosen = setup.folder / f"fault{name}.ids"
    chosen.write_text("\n".join(ids))
    directory = f"--attnlab-dir={setup.failures / f'fault{name}'}"
    words = ("--attnlab", f"--ids={chosen}", directory, *words)
    return setup.pytest(f"report{name}", [fault.tests], *words, limit_s=RUN_LIMIT_S, threads=2)


def judged(own: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """Return a report with what other data say about it; names are not yet verified on fresh cases."""
    report = {"id": own["id"], "properties": own["properties"], "error": own["error"][:200]}
    if not own["judgements"] and not own["calls"]:
        return {**report, "answer": "no known op", "why": "the test called no recorded op"}
    if not own["judgements"]:
        why = own["properties"].get("attnlab_diagnosis", "no call was recorded")
        return {**report, "answer": "no report" if not reported(own) else "abstained", "why": why}
    first = own["judgements"][-1]  # of the call that is reported
    second = other["judgements"][-1] if other and other["judgements"] else None
    report |= {"judgement": first, "other_data": second}
    if first["status"] in ("explained", "ambiguous"):
        confirmed = [n for n in first["names"] if second and n in second["names"]]
        return {**report, "answer": "to verify", "confirmed": confirmed}
    if first["status"] == "described":
        kinds = {kind for kind, _ in first["rules"]}
        holds = second is not None and kinds <= {kind for kind, _ in second["rules"]}
        return {**report, "answer": "described" if holds else "described, not repeated"}
    return {
        **report,
        "answer": "nothing wrong" if first["status"] == "nothing wrong" else "abstained",
    }


def verified(
    setup: Setup, number: int, root: Path, reports: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Verify the names of reports on fresh cases, in a process of its own."""
    named = [one for one in reports if one["answer"] == "to verify"]
    if not named:
        return reports
    order = setup.folder / f"judge{number}.json"
    orders = [{"id": one["id"], "names": one["judgement"]["names"]} for one in named]
    order.write_text(json.dumps({"root": str(root), "reports": orders}))
    cache = {"ATTNLAB_CACHE": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--judge", str(order)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **cache}, check=False
    )
    try:
        verdicts = json.loads(done.stdout)
    except ValueError:
        verdicts = [{"error": done.stderr[-300:]} for _ in named]
    for report, fresh in zip(named, verdicts, strict=True):
        report["fresh_cases"] = fresh
        report["answer"] = answer_of(report, fresh)
    return reports


def answer_of(report: dict[str, Any], fresh: dict[str, Any]) -> str:
    """Return whether a name is right: it holds with other data, and fresh cases do not contradict it."""
    judgement = report["judgement"]
    right = [
        name
        for name in judgement["names"]
        if not fresh.get(name, {}).get("against")
        and (name in report["confirmed"] or fresh.get(name, {}).get("for"))
        and (report["other_data"] is None or name in report["confirmed"])
    ]
    if judgement["status"] == "explained":
        return "named rightly" if right else "named wrongly"
    return "right in a shortlist" if right else "wrong shortlist"


def judge_names(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Return, for each report, how many fresh cases speak for and against each name."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = find_backend("vllm", Path(order["root"]), device)
    lab = Lab(source=Path(order["root"]), device="cpu")
    verdicts: list[dict[str, Any]] = []
    for report in order["reports"]:
        try:
            case = Case.from_test_id(report["id"], backend="vllm", platform="sm_90")
            verdicts.append({name: votes(lab, backend, case, name) for name in report["names"]})
        except AttnLabError as error:
            verdicts.append({"error": str(error)})
    return verdicts


def votes(lab: Lab, backend: Any, case: Case, name: str) -> dict[str, int]:
    """Return on how many fresh cases with a wrong output the defect explains it, and on how many not."""
    found = {"for": 0, "against": 0}
    for fresh in fresh_cases(case):
        try:
            output = run_case(lab, backend, fresh).output
        except AttnLabError:
            continue
        if not diagnose(fresh, output, lab=lab, defects=(), propose=False).is_wrong:
            continue
        only = diagnose(fresh, output, lab=lab, defects=(DEFECTS[name],), propose=False)
        found["for" if only.status == "explained" else "against"] += 1
    return found


RUN = {"sound": run_sound, "overhead": run_overhead, "power": run_power, "faults": run_faults}


# Tables.


@dataclass(slots=True)
class Table:
    """Rows of a Markdown table."""

    lines: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add a row; the first is the head."""
        self.lines.append(f"| {' | '.join(map(str, cells))} |")
        if len(self.lines) == 1:
            self.lines.append("|---" * len(cells) + "|")


def summary(document: dict[str, Any]) -> str:
    """Return the tables of a document."""
    tables = {
        "sound": sound_table,
        "overhead": overhead_table,
        "power": power_table,
        "faults": faults_table,
    }
    texts = [
        "\n".join(make(document[part]).lines) for part, make in tables.items() if part in document
    ]
    return "\n\n".join(texts)


def sound_table(part: dict[str, Any]) -> Table:
    """Return how many tests passed, by file."""
    table = Table()
    table.add("file", "passed", "failed", "skipped")
    for name, counts_of in part["tests"].items():
        table.add(f"`{name}`", *counts_of.values())
    return table


def overhead_table(part: dict[str, Any]) -> Table:
    """Return times and memory, by file."""
    table = Table()
    table.add("file", "tests", "without", "with", "overhead", "memory without", "with")
    for name, one in [*part["files"].items(), ("all", part["all"])]:
        table.add(
            name,
            one["tests"],
            f"{one['without_s']:.2f} s",
            f"{one['with_s']:.2f} s",
            f"{100 * (one['overhead'] or 0):.1f} %",
            f"{one['without_mib']:.0f} MiB",
            f"{one['with_mib']:.0f} MiB",
        )
    return table


def power_table(part: dict[str, Any]) -> Table:
    """Return, for each test function, how many defects it notices on the drawn ids."""
    table = Table()
    table.add("test", "ids", "notices", "of", "compares with itself")
    by_test: dict[str, list[dict[str, Any]]] = {}
    for one in part["tests"]:
        by_test.setdefault(one["node_id"].partition("::")[2].partition("[")[0], []).append(one)
    for name, ones in by_test.items():
        killed = [len(one["killed"]) for one in ones]
        totals = [len(one["killed"]) + len(one["survived"]) for one in ones]
        itself = "yes" if any(one["with_itself"] for one in ones) else ""
        ids = len({one["node_id"] for one in ones})
        table.add(f"`{name}`", ids, between(killed), between(totals), itself)
    return table


def between(numbers: Sequence[int]) -> str:
    """Return "3" or "3 to 5"."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def faults_table(part: dict[str, Any]) -> Table:
    """Return how many faults are in each class, and the answers of the reports."""
    table = Table()
    table.add("what", "number")
    faults = part["faults"]
    table.add("faults planted", len(faults))
    for name, number in Counter(one["class"] for one in faults).most_common():
        table.add(f"faults: {name}", number)
    reports = [report for one in faults for report in one.get("reports", [])]
    table.add("reports", len(reports))
    for name, number in Counter(one["answer"] for one in reports).most_common():
        table.add(f"reports: {name}", number)
    sides = Counter(one["judgement"]["side"] for one in reports if "judgement" in one)
    for name, number in sides.most_common():
        table.add(f"wrong side: {name}", number)
    return table


if __name__ == "__main__":
    sys.exit(main())
