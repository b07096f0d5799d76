"""Print which of the defects fixed in vLLM's history `attnlab check` finds, as a Markdown table.

python tools/recall.py REPOSITORY              REPOSITORY is a git directory of vLLM, with its history
python tools/recall.py REPOSITORY 30887 49294  only these pull requests
python tools/recall.py REPOSITORY --out FILE   also write the table as JSON, with date and versions

For each fix, the op of the commit before it runs the hostile cases until one has a finding of the fix's
kind and diagnosis. With the fix, the same case must not have it.
"""

import argparse
import dataclasses
import json
import subprocess
import tarfile
import tempfile
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.checker.case_check import check_case, is_callers_fault
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.sources import versions
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend
from attnlab.kernels.vllm.source import OPS_FOLDERS
from attnlab.lab.lab import Lab

CHUNKED, PREFILL, UNIFIED = (
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "unified_attention",
)
DECODE, MERGE, WRITE = "decode_attention_fwd", "merge_attn_states", "reshape_and_cache_flash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A commit of vLLM that fixed an op: what was wrong, and how its finding's diagnosis begins."""

    pull: int
    commit: str
    op: str
    wrong: str
    kind: str
    diagnosis: str
    backend: str = "vllm"
    platform: str = "sm_90"
    has_scale: bool = True  # the op has the argument sm_scale


LEAK, OUTPUT, FAILS = "reads_unwritten_slots", "wrong_output", "fails"
FIXES = (
    Fix(
        pull=15492,
        commit="33437bc6e7",
        op=MERGE,
        wrong="a log-sum-exp of +inf, as FlashAttention 2 returns for an empty part, makes NaN",
        kind=OUTPUT,
        diagnosis="padding not left out",  # such a part belongs to a padded row
    ),
    Fix(
        pull=18100,
        commit="269d901734",
        op=UNIFIED,
        wrong="3 or 5 query heads per KV head do not compile",
        kind=FAILS,
        diagnosis="arange's range must be a power of #",
    ),
    Fix(
        pull=23424,
        commit="6d80ae83e1",
        op=UNIFIED,
        wrong="more than 16 query heads per KV head divide by zero",
        kind=FAILS,
        diagnosis="integer division or modulo by zero",
    ),
    Fix(
        pull=21197,
        commit="01a583fea4",
        op=UNIFIED,
        wrong="blocks of 48 or 544 tokens do not compile",
        kind=FAILS,
        diagnosis="arange's range must be a power of #",
    ),
    Fix(
        pull=21197,
        commit="01a583fea4",
        op=UNIFIED,
        wrong="NaN after a sequence's end reaches the output",
        kind=LEAK,
        diagnosis="empty slots",
    ),
    Fix(
        pull=28432,
        commit="15ae8e0784",
        op=WRITE,
        wrong="padding tokens are written to slots read from after the end of slot_mapping",
        kind="wrong_bytes",
        diagnosis="padding not left out",
    ),
    Fix(
        pull=30887,
        commit="b5545d9d5c",
        op=UNIFIED,
        wrong="NaN in blocks before the window reaches the output",
        kind="reads_freed_blocks",
        diagnosis="empty blocks",
    ),
    Fix(
        pull=31380,
        commit="1a19e9cd87",
        op=CHUNKED,
        wrong="the default scale uses the number of heads",
        kind=OUTPUT,
        diagnosis="scale_by_num_heads",
    ),
    Fix(
        pull=31380,
        commit="1a19e9cd87",
        op=PREFILL,
        wrong="blocks of 48 or 544 tokens do not compile",
        kind=FAILS,
        diagnosis="arange's range must be a power of #",
    ),
    Fix(
        pull=37940,
        commit="dc0428ebb8",
        op=WRITE,
        wrong="with heads before slots (HND) the write goes to other slots",
        kind="wrong_bytes",
        diagnosis="strides ignored",
    ),
    Fix(
        pull=45111,
        commit="aa4990a9a2",
        op=DECODE,
        wrong="with gaps between blocks the wrong slots are read",
        kind=OUTPUT,
        diagnosis="strides ignored",
    ),
    Fix(
        pull=47305,
        commit="4787f2dd1b",
        op=CHUNKED,
        wrong="NaN after a sequence's end reaches the output",
        kind=LEAK,
        diagnosis="empty slots",
    ),
    Fix(
        pull=49294,
        commit="060b5f61dc",
        op=MERGE,
        wrong="two empty parts make NaN",
        kind=OUTPUT,
        diagnosis="both parts empty",
    ),
    Fix(
        pull=4405,
        commit="32881f3f31",
        op=PREFILL,
        wrong="the sliding window is ignored",
        kind=OUTPUT,
        diagnosis="window_ignored",
        has_scale=False,
    ),
    Fix(
        pull=6373,
        commit="e1684a766a",
        op=PREFILL,
        wrong="float32 keys are read with the packs of float16",
        kind=OUTPUT,
        diagnosis="unexplained",
        has_scale=False,
    ),
    Fix(
        pull=20308,
        commit="22dd9c2730",
        op=UNIFIED,
        wrong="keys after a row are read, and hidden by the mask alone",
        kind="reads_future_slots",
        diagnosis="own future",
    ),
    Fix(
        pull=23692,
        commit="457e471971",
        op=PREFILL,
        wrong="block offsets beyond 2^31 elements overflow",
        kind=OUTPUT,
        diagnosis="block offset beyond 2^31 elements",
    ),
    Fix(
        pull=30974,
        commit="ac1c934276",
        op=UNIFIED,
        wrong="keys of bidirectional ranges after a block of rows, or before a window, are skipped",
        kind=OUTPUT,
        diagnosis="",  # of any name
    ),
    Fix(
        pull=41119,
        commit="7f95e66a11",
        op=DECODE,
        wrong="MLA with other sizes than 576 and 288 does not compile",
        kind=FAILS,
        diagnosis="Cannot make_shape_compatible",
    ),
    Fix(
        pull=46548,
        commit="b3a688cb9e",
        op=CHUNKED,
        wrong="csrc/rocm reads the query out of bounds",
        kind=FAILS,
        diagnosis="out of bounds: read of #",
        backend="rocm",
        platform="gfx942",
    ),
    Fix(
        pull=47217,
        commit="979f5511d7",
        op=UNIFIED,
        wrong="bidirectional ranges extend beyond the sliding window",
        kind=OUTPUT,
        diagnosis="",  # of any name
    ),
    Fix(
        pull=47305,
        commit="4787f2dd1b",
        op=UNIFIED,
        wrong="NaN after a sequence's end reaches bidirectional rows",
        kind=LEAK,
        diagnosis="",  # of any name
    ),
    Fix(
        pull=47671,
        commit="095adf1fdc",
        op=DECODE,
        wrong="block offsets beyond 2^31 elements overflow",
        kind=OUTPUT,
        diagnosis="block offset beyond 2^31 elements",
    ),
    Fix(
        pull=50089,
        commit="7c6729b769",
        op=MERGE,
        wrong="strides of the log-sum-exp are ignored",
        kind=OUTPUT,
        diagnosis="op_argument gaps",
    ),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Recall on vLLM's history.")
    parser.add_argument("repository")
    parser.add_argument("pulls", nargs="*", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    wanted = sorted(
        (fix for fix in FIXES if not args.pulls or fix.pull in args.pulls), key=lambda f: f.pull
    )
    print("| pull request | op | what was wrong | before | the same case after | s |")
    print("| --- | --- | --- | --- | --- | --- |")
    found, rows = 0, list[dict[str, Any]]()
    for fix in wanted:
        began = time.perf_counter()
        before, after = compare_commits(args.repository, fix)
        found += before.startswith("found") and after == "no finding"
        rows.append({**dataclasses.asdict(fix), "before": before, "after": after})
        seconds = f"{time.perf_counter() - began:.0f}"
        print(
            f"| #{fix.pull} | {fix.op} | {fix.wrong} | {before} | {after} | {seconds} |", flush=True
        )
    print(f"\n{found} of {len(wanted)} found before the fix and not after it")
    if args.out is not None:
        facts = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "versions": versions()}
        args.out.write_text(json.dumps({**facts, "found": found, "fixes": rows}, indent=1) + "\n")


def compare_commits(repository: str, fix: Fix) -> tuple[str, str]:
    """Return in words what the check finds before a fix and, with the same case, after it.

    A case that shows another fault of the same kind is passed over: a later one may show this fault alone.
    """
    answer = "not found", "not run"
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        unpack(repository, f"{fix.commit}^", Path(before))
        unpack(repository, fix.commit, Path(after))
        old = find_backend(fix.backend, Path(before), "cpu")
        lab = Lab(source=Path(before), device="cpu")
        for i, case in enumerate(hostile_cases(old, fix.op, fix.platform, None, 0), 1):
            case = case if fix.has_scale else case.replace(sm_scale=None)
            if not is_callers_fault(lab, case) and is_found(lab, old, case, fix):
                new = Lab(source=Path(after), device="cpu")
                again = is_found(new, find_backend(fix.backend, Path(after), "cpu"), case, fix)
                if not again:
                    return f"found, case {i}", "no finding"
                answer = f"found, case {i}", "found"
    return answer


def is_found(lab: Lab, backend: Backend, case: Case, fix: Fix) -> bool:
    """Return whether the check of a Case finds the defect that the fix removes."""
    try:
        findings = check_case(lab, backend, case)
    except Unavailable:
        return False
    return any(f.kind == fix.kind and f.diagnosis.startswith(fix.diagnosis) for f in findings)


def unpack(repository: str, commit: str, folder: Path) -> None:
    """Unpack the attention ops of a commit into a folder."""
    for path in (*OPS_FOLDERS, "csrc/rocm"):
        done = subprocess.run(
            ["git", "-C", repository, "archive", commit, path], capture_output=True
        )
        if done.returncode == 0:  # a commit has some of the folders
            with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
                archive.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
