"""Print how many of the defects that vLLM's history fixed `attnlab check` finds, as a Markdown table.

python tools/recall.py REPOSITORY              REPOSITORY is a git directory of vLLM, with its history
python tools/recall.py REPOSITORY 30887 49294  these alone, by the numbers of their pull requests

For each fix the op just before it runs the hostile cases until one shows a finding of the fix's kind and
diagnosis; just after the fix the same case must not.
"""

import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.checker.check_case import look
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.library import is_callers_fault
from attnlab.checker.subject import Subject, vllm
from attnlab.checker.public import DEFAULT_CASES
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
    """A commit of vLLM that mended an op: what was wrong, and how a finding of it begins."""

    pull: int
    commit: str
    op: str
    wrong: str
    kind: str
    diagnosis: str


LEAK, OUTPUT, FAILS = "reads_unwritten_slots", "wrong_output", "fails"
FIXES = (
    Fix(
        pull=15492,
        commit="33437bc6e7",
        op=MERGE,
        wrong="a logarithm of +inf, FlashAttention 2's of an empty part, makes NaN",
        kind=OUTPUT,
        diagnosis="padding not left out",  # which such a part comes with
    ),
    Fix(
        pull=18100,
        commit="269d901734",
        op=UNIFIED,
        wrong="3 or 5 query heads a KV head do not compile",
        kind=FAILS,
        diagnosis="arange's range must be a power of #",
    ),
    Fix(
        pull=23424,
        commit="6d80ae83e1",
        op=UNIFIED,
        wrong="more than 16 query heads a KV head divide by zero",
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
        wrong="NaN behind a sequence's end reaches the output",
        kind=LEAK,
        diagnosis="empty slots",
    ),
    Fix(
        pull=28432,
        commit="15ae8e0784",
        op=WRITE,
        wrong="padded tokens are written to slots read behind slot_mapping",
        kind="wrong_bytes",
        diagnosis="padding not left out",
    ),
    Fix(
        pull=30887,
        commit="b5545d9d5c",
        op=UNIFIED,
        wrong="NaN in blocks behind the window reaches the output",
        kind="reads_freed_blocks",
        diagnosis="empty blocks",
    ),
    Fix(
        pull=31380,
        commit="1a19e9cd87",
        op=CHUNKED,
        wrong="the default scale is by the number of heads",
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
        wrong="heads before slots (HND) are written elsewhere",
        kind="wrong_bytes",
        diagnosis="strides ignored",
    ),
    Fix(
        pull=45111,
        commit="aa4990a9a2",
        op=DECODE,
        wrong="blocks with room between them are read elsewhere",
        kind=OUTPUT,
        diagnosis="strides ignored",
    ),
    Fix(
        pull=47305,
        commit="4787f2dd1b",
        op=CHUNKED,
        wrong="NaN behind a sequence's end reaches the output",
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
)


def main() -> None:
    """Print the table."""
    repository, *pulls = sys.argv[1:] or sys.exit("give the git directory of vLLM")
    wanted = [fix for fix in FIXES if not pulls or str(fix.pull) in pulls]
    print("| pull request | op | what was wrong | before | the same case after | s |")
    print("| --- | --- | --- | --- | --- | --- |")
    found = 0
    for fix in wanted:
        began = time.perf_counter()
        there, gone = judged(repository, fix)
        found += there.startswith("found") and gone == "quiet"
        seconds = f"{time.perf_counter() - began:.0f}"
        print(
            f"| #{fix.pull} | {fix.op} | {fix.wrong} | {there} | {gone} | {seconds} |", flush=True
        )
    print(f"\n{found} of {len(wanted)} found before and quiet after")


def judged(repository: str, fix: Fix) -> tuple[str, str]:
    """Return how the ops just before a fix and just after it did, in words."""
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        unpack(repository, f"{fix.commit}^", Path(before))
        unpack(repository, fix.commit, Path(after))
        old, lab = vllm(Path(before)), Lab(source=Path(before), device="cpu")
        for i, case in enumerate(hostile_cases(old, fix.op, "sm_90", DEFAULT_CASES, 0), 1):
            if not is_callers_fault(lab, case) and seen(lab, old, case, fix):
                new = Lab(source=Path(after), device="cpu")
                again = seen(new, vllm(Path(after)), case, fix)
                return f"found, case {i} of {DEFAULT_CASES}", "found" if again else "quiet"
    return "not found", "not looked at"


def seen(lab: Lab, subject: Subject, case: Case, fix: Fix) -> bool:
    """Answer whether what a fix mended is among the findings of a Case."""
    try:
        findings = look(lab, subject, case)
    except Unavailable:
        return False
    return any(one.kind == fix.kind and one.diagnosis.startswith(fix.diagnosis) for one in findings)


def unpack(repository: str, commit: str, folder: Path) -> None:
    """Put the attention ops of a commit into a folder."""
    for path in OPS_FOLDERS:
        done = subprocess.run(
            ["git", "-C", repository, "archive", commit, path], capture_output=True
        )
        if done.returncode == 0:  # a commit has the one folder or the other, or both
            with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
                archive.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
