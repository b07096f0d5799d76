"""Print which of the defects fixed in vLLM's history `attnlab check` finds, as a Markdown table.

python tools/recall.py REPOSITORY                        a git directory of vLLM, with its history
python tools/recall.py REPOSITORY 30887 cb2ad7a67        only these pull requests or commits
python tools/recall.py REPOSITORY --fork ROCm/vllm=DIR   also the fixes in a fork, whose git directory is DIR
python tools/recall.py REPOSITORY --out FILE             also write the table as JSON, with date and versions

The fixes are those of docs/recall.json. For each one, the op of the commit before it runs the hostile cases
until one has a finding of the fix's kind and diagnosis. With the fix, the same case must not have it. Fixes
in forks are from the development of a pull request: they correct a fault that its first commits had. Some
fixes are known by release only; the two releases must have been downloaded (`attnlab fetch`). Writes in
further formats are checked by `attnlab writes`.
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

FIXES_FILE = Path(__file__).parents[1] / "docs" / "recall.json"


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


def known_fixes() -> list[Fix]:
    """Return the fixes of the recorded table; a new one is added there, without its outcome."""
    names = [field.name for field in dataclasses.fields(Fix)]
    rows = json.loads(FIXES_FILE.read_text())["fixes"]
    return [Fix(**{name: row[name] for name in names if name in row}) for row in rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Recall on vLLM's history.")
    parser.add_argument("repository")
    parser.add_argument("only", nargs="*", help="pull requests or commits")
    parser.add_argument("--fork", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    folders = {"": args.repository, **dict(one.split("=", 1) for one in args.fork)}
    fixes = known_fixes()
    wanted = [
        fix
        for fix in sorted(fixes, key=lambda one: (one.fork, one.pull or 1 << 30, one.commit))
        if fix.fork in folders and (not args.only or {str(fix.pull), fix.commit} & {*args.only})
    ]
    if args.out is not None and len(wanted) < len(fixes):
        parser.error("out must be given with all fixes, those in forks included")
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
    if left := len([fix for fix in fixes if fix.fork not in folders]):
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
