"""Print which of the defects fixed in vLLM's history `attnlab check` finds, as a Markdown table.

python tools/recall.py REPOSITORY                        a git directory of vLLM, with its history
python tools/recall.py REPOSITORY 30887 cb2ad7a67        only these pull requests or commits
python tools/recall.py REPOSITORY --fork ROCm/vllm=DIR   also the fixes in a fork, whose git directory is DIR
python tools/recall.py REPOSITORY --out FILE             also write the table as JSON, with date and versions

For each fix, the op of the commit before it runs the hostile cases until one has a finding of the fix's
kind and diagnosis. With the fix, the same case must not have it. Fixes in forks are from the development of
a pull request: they correct a fault that its first commits had. Some fixes are known by release only; the
two releases must have been downloaded (`attnlab fetch`). Writes in further formats are checked by `attnlab
writes`.
"""

import argparse
import dataclasses
import json
import re
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
from attnlab.checker.case_run import versions
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend
from attnlab.kernels.vllm.source import OPS_FOLDERS, fetched_wheel
from attnlab.lab.lab import Lab
from attnlab.lab.writes import check_writes

CHUNKED, PREFILL, UNIFIED = (
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "unified_attention",
)
ENCODER = "triton_prefill_attention"
DECODE, MERGE, WRITE = "decode_attention_fwd", "merge_attn_states", "reshape_and_cache_flash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A commit of vLLM that fixed an op: what was wrong, and how its finding's diagnosis begins.

    - ``commit``: the fix, or two releases, "0.30.0 0.31.0": the second has the fix. ``pull``: the pull
      request, 0 if there is none or it is not known. ``fork``: the repository of the commit, "" for vLLM's.
    - ``backend``: "writes" for the writes of `attnlab writes`; then ``diagnosis`` is the begin of their name.
    """

    pull: int = 0
    commit: str
    fork: str = ""
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
    Fix(
        pull=12676,
        commit="75e94309e8",
        op=DECODE,
        wrong="with several KV heads the strides of other dimensions are used",
        kind=OUTPUT,
        diagnosis="",  # of any name
    ),
    Fix(
        pull=15717,
        commit="40a36ccfeb",
        op=PREFILL,
        wrong="on ROCm an FP8 cache is read in NVIDIA's format",
        kind=OUTPUT,
        diagnosis="read_as_fp8_e4m3fn",
        platform="gfx942",
    ),
    Fix(
        pull=17870,
        commit="06c0922a69",
        op=CHUNKED,
        wrong="on ROCm an FP8 cache is read in NVIDIA's format",
        kind=OUTPUT,
        diagnosis="read_as_fp8_e4m3fn",
        platform="gfx942",
    ),
    Fix(
        pull=27457,
        commit="d9d342d214",
        op=MERGE,
        wrong="padded heads of the outputs are read and written as if they had no padding",
        kind=OUTPUT,
        diagnosis="op_argument padded_heads",
    ),
    Fix(
        pull=31380,
        commit="1a19e9cd87",
        op=CHUNKED,
        wrong="blocks of 48 or 544 tokens do not compile",
        kind=FAILS,
        diagnosis="arange's range must be a power of #",
    ),
    Fix(
        pull=45361,
        commit="9c450b1027",
        op=WRITE,
        wrong="int8 with a scale per token and head is truncated instead of rounded",
        kind="numbers",
        diagnosis="int8_per_token_head",
        backend="writes",
    ),
    Fix(
        commit="0.30.0 0.31.0",
        op=UNIFIED,
        wrong="a score of more than 88 times the soft cap overflows",
        kind=OUTPUT,
        diagnosis="softcap_overflows",
    ),
    Fix(
        commit="0.32.0 0.33.0",
        op=UNIFIED,
        wrong="the maximum of a tile without visible keys is taken as 0, so scores far below 0 are lost",
        kind=OUTPUT,
        diagnosis="",  # of any name
    ),
    Fix(
        pull=32149,
        commit="9dbe1fe960",
        op=ENCODER,
        wrong="the scale of the scores cannot be passed: that of the head size is used",
        kind=OUTPUT,
        diagnosis="",  # of any name
    ),
    Fix(
        commit="4c69da854",
        fork="tdoublep/vllm",
        op=UNIFIED,
        wrong="positions of keys are multiplied by the tile size twice",
        kind=OUTPUT,
        diagnosis="keys from the cache from position #",
    ),
    Fix(
        commit="d457cf2d6",
        fork="ROCm/vllm",
        op=PREFILL,
        wrong="block offsets beyond 2^31 elements overflow in the kernel for ALiBi",
        kind=OUTPUT,
        diagnosis="block offset beyond 2^31 elements",
    ),
    Fix(
        commit="cb2ad7a67",
        fork="ROCm/vllm",
        op=PREFILL,
        wrong="an FP8 output is multiplied by its scale instead of divided",
        kind=OUTPUT,
        diagnosis="op_argument fp8_output",
    ),
    Fix(
        commit="1bebe0bfb",
        fork="EmbeddedLLM/vllm",
        op=CHUNKED,
        wrong="a tile that crosses the end of a block reads on in the same block",
        kind=OUTPUT,
        diagnosis="",
    ),
    Fix(
        commit="1bebe0bfb",
        fork="EmbeddedLLM/vllm",
        op=PREFILL,
        wrong="a tile that crosses the end of a block reads on in the same block",
        kind=OUTPUT,
        diagnosis="",
    ),
    Fix(
        commit="c264c2bc3",
        fork="EmbeddedLLM/vllm",
        op=CHUNKED,
        wrong="keys of every format are read in packs of 8",
        kind=OUTPUT,
        diagnosis="",
    ),
    Fix(
        commit="c264c2bc3",
        fork="EmbeddedLLM/vllm",
        op=PREFILL,
        wrong="keys of every format are read in packs of 8",
        kind=OUTPUT,
        diagnosis="",
    ),
    Fix(
        commit="219464e03",
        fork="EmbeddedLLM/vllm",
        op=WRITE,
        wrong="keys of every format are written in packs of 8",
        kind="wrong_bytes",
        diagnosis="",
    ),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Recall on vLLM's history.")
    parser.add_argument("repository")
    parser.add_argument("only", nargs="*", help="pull requests or commits")
    parser.add_argument("--fork", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    folders = {"": args.repository, **dict(one.split("=", 1) for one in args.fork)}
    wanted = [
        fix
        for fix in sorted(FIXES, key=lambda one: (one.fork, one.pull or 1 << 30, one.commit))
        if fix.fork in folders and (not args.only or {str(fix.pull), fix.commit} & {*args.only})
    ]
    print("| fix | op | what was wrong | before | the same case after | s |")
    print("| --- | --- | --- | --- | --- | --- |")
    found, rows = 0, list[dict[str, Any]]()
    for fix in wanted:
        began = time.perf_counter()
        before, after = compare_commits(folders[fix.fork], fix)
        found += before.startswith("found") and after == "no finding"
        rows.append({**dataclasses.asdict(fix), "before": before, "after": after})
        seconds = f"{time.perf_counter() - began:.0f}"
        print(
            f"| {name_of(fix)} | {fix.op} | {fix.wrong} | {before} | {after} | {seconds} |",
            flush=True,
        )
    print(f"\n{found} of {len(wanted)} found before the fix and not after it")
    if left := len([fix for fix in FIXES if fix.fork not in folders]):
        print(f"{left} fixes in forks were not tried: give their repositories with --fork")
    if args.out is not None:
        facts = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "versions": versions()}
        args.out.write_text(json.dumps({**facts, "found": found, "fixes": rows}, indent=1) + "\n")


def name_of(fix: Fix) -> str:
    """Return the pull request of a fix, its commit, or the releases around it."""
    if fix.fork:
        return f"{fix.fork}@{fix.commit}"
    return f"#{fix.pull}" if fix.pull else fix.commit.replace(" ", " to ")


def compare_commits(repository: str, fix: Fix) -> tuple[str, str]:
    """Return in words what the check finds before a fix and, with the same case, after it.

    A case that shows another fault of the same kind is passed over: a later one may show this fault alone.
    """
    releases = fix.commit.split() if " " in fix.commit else None
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        folders = [Path(before), Path(after)]
        if releases is None:
            unpack(repository, f"{fix.commit}^", folders[0])
            unpack(repository, fix.commit, folders[1])
        else:
            folders = [fetched(release) for release in releases]
        return compare_writes(*folders, fix) if fix.backend == "writes" else compare(*folders, fix)


def fetched(release: str) -> Path:
    """Return the wheel of a release; raise Unavailable if it was not downloaded."""
    wheel = fetched_wheel(release)
    if wheel is None:
        raise Unavailable(f"vLLM {release} must be downloaded first: attnlab fetch {release}")
    return wheel


def compare(before: Path, after: Path, fix: Fix) -> tuple[str, str]:
    """Compare two sources by the hostile cases of an op."""
    answer = "not found", "not run"
    old, lab = find_backend(fix.backend, before, "cpu"), Lab(source=before, device="cpu")
    for i, case in enumerate(hostile_cases(old, fix.op, fix.platform, None, 0), 1):
        case = case if fix.has_scale else case.replace(sm_scale=None)
        if not is_callers_fault(lab, case) and is_found(lab, old, case, fix):
            new = Lab(source=after, device="cpu")
            again = is_found(new, find_backend(fix.backend, after, "cpu"), case, fix)
            if again is False:
                return f"found, case {i}", "no finding"
            answer = f"found, case {i}", "found" if again else "not run"
    return answer


def compare_writes(before: Path, after: Path, fix: Fix) -> tuple[str, str]:
    """Compare two sources by the hostile writes of `attnlab writes`."""
    answer = "not found", "not run"
    later = {one.name: one for one in check_writes(source=after).results}
    for i, one in enumerate(check_writes(source=before).results, 1):
        if one.name.startswith(fix.diagnosis) and fix.kind in one.wrong:
            again = later[one.name]
            if not again.error and fix.kind not in again.wrong:
                return f"found, write {i}", "no finding"
            answer = f"found, write {i}", "found" if not again.error else "not run"
    return answer


def is_found(lab: Lab, backend: Backend, case: Case, fix: Fix) -> bool | None:
    """Return whether the check of a Case finds the defect that the fix removes; None if it cannot run."""
    try:
        findings = check_case(lab, backend, case)
    except Unavailable:
        return None
    return any(
        found.kind == fix.kind
        and re.sub(r"\d+", "#", found.diagnosis).startswith(re.sub(r"\d+", "#", fix.diagnosis))
        for found in findings
    )


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
