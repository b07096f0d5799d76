"""The command ``attnlab matrix``."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.flags import add_field_flags, add_source_flag, flag, given_fields
from attnlab.case.output_file import check_output_file, write_text
from attnlab.case.pytest_id import vllm_test_ids
from attnlab.cli import command
from attnlab.cli.command import Command, put
from attnlab.cli.sharded import add_engine, add_shard, check_flags, print_shard, run_sharded
from attnlab.tasks.run import check_engine

_ID = re.compile(r"\w+\[.*\]")
_COLLECT_S = 600  # pytest imports vLLM


def read_ids(words: Sequence[str], standard_input: Iterable[str]) -> list[str]:
    """Return the test ids that words name, without repetitions.

    A word is an id, a pytest node that ends with one, a file with one of these per line, "-" for standard
    input, or a test file, whose ids pytest collects. Raises InvalidCase for anything else, and Unavailable
    if pytest cannot collect a test file.
    """
    found: list[str] = []
    for word in words:
        if _ID.search(word):
            found.append(_id_of(word))
        elif word == "-":
            found += [_id_of(line) for line in standard_input if line.strip()]
        elif Path(word).suffix == ".py" and Path(word).is_file():
            found += _collected(Path(word))
        elif Path(word).is_file():
            lines = Path(word).read_text(errors="replace").splitlines()
            found += [_id_of(line) for line in lines if line.strip()]
        else:
            raise InvalidCase(
                f"id must be a test id, a file of ids, a test file or -, got {word!r}", field="id"
            )
    if not found:
        raise InvalidCase("id must name at least one test, got none", field="id")
    return list(dict.fromkeys(found))


def _id_of(line: str) -> str:
    """Return the id in a line of pytest, such as tests/test_a.py::test_b[c]."""
    match = _ID.search(line)
    if match is None:
        raise InvalidCase(f"id must be like test_name[…], got {line.strip()!r}", field="id")
    return match[0]


def _collected(file: Path) -> list[str]:
    """Return the ids that pytest collects from a test file."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(file)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_COLLECT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pytest collects no tests from {file} in {_COLLECT_S} s") from error
    found = [_id_of(line) for line in done.stdout.splitlines() if "::" in line and _ID.search(line)]
    if not found:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"]
        raise Unavailable(f"pytest collects no test with parameters from {file}: {lines[-1]}")
    return found


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ids",
        nargs="*",
        metavar="ID",
        help="a test id, a file with one per line, - for standard input, or a test file whose ids pytest "
        "collects (default: the 192 ids of vLLM's test_prefix_prefill.py that a ROCm test runs)",
    )
    output = parser.add_argument_group("what to write")
    flag(output, "--junit FILE", "JUnit XML: a test case per id")
    command.add_share_flags(parser)
    where: Any = parser.add_argument_group("where to run it")
    add_source_flag(where)
    add_engine(where, "default: local, one worker per core, or this process on a GPU")
    add_shard(where)
    add_field_flags(parser, FIELDS)


def _run(args: argparse.Namespace) -> int:
    changes = given_fields(args, FIELDS)
    for name, value in changes.items():
        field_type(name).check(name, value)
    if args.engine is not None:
        check_engine(args.engine)
    command.check_share_flags(args)
    if args.junit is not None:
        check_output_file(args.junit, "junit")
    if args.source is not None and changes.get("backend") not in ("vllm", "rocm", "cuda"):
        raise InvalidCase(
            "source must be given with --backend vllm, rocm or cuda, got "
            f"{changes.get('backend', 'model')}",
            field="source",
        )
    shard = check_flags(args.shard, args.out)
    ids = read_ids(args.ids, sys.stdin) if args.ids else vllm_test_ids()

    from attnlab.checker.matrix import matrix_header, matrix_job, matrix_table, matrix_tasks

    job = matrix_job(changes, args.source, args.device)
    tasks = matrix_tasks(ids, changes)
    header = matrix_header(ids, changes, job.versions, shard)
    engine = args.engine or (None if job.device == "cuda" or len(tasks) == 1 else "local")
    outcomes, code = run_sharded("running the ids", job, tasks, header, shard, args.out, engine)
    if shard.count > 1:
        return print_shard(shard, outcomes, args.json) or code
    table = matrix_table(
        ids, [(one, outcomes.get(one.key)) for one in tasks], changes, job.versions["backend"]
    )
    if args.junit is not None:
        write_text(args.junit, table.junit())
    pictures: tuple[Any, ...] = ()
    if args.html is not None:
        from attnlab.reports.shared_page import matrix_pictures

        pictures = matrix_pictures(table)
    command.share(args, table, pictures=pictures)
    put(table, args.json)
    return code or table.exit_code


COMMAND = Command(
    name="matrix",
    purpose="Run all ids of a test, and print a table of their outcomes.",
    arguments="[ID …]",
    examples=(
        "attnlab matrix --platform gfx942 --draw-max-query-len 40 --draw-max-ctx-len 40",
        "attnlab matrix tests/kernels/attention/test_prefix_prefill.py --backend vllm --device cuda",
        "attnlab matrix ids.txt --platform gfx942 --html matrix.html --junit matrix.xml",
    ),
    exit_codes="0 every id matches; 1 an id mismatches or is rejected; 3 all that ran match, but some "
    "did not run; with --shard, 0 the shard ran, 3 not all of it; 128 + n stopped by signal n",
    add_flags=_add_flags,
    run=_run,
    notes="A flag of a Case changes every id, for example its platform, its stage or its size. Ids that "
    "share a batch and a cache run one after the other. With --out, the same command continues where it "
    "stopped.",
)
