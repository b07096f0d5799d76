"""Rebuild the faults of public threads, and let the command of attnlab that takes each in find it.

    python tools/threads.py REPOSITORIES --out docs/threads.json             all threads of tools/threads.toml
    python tools/threads.py REPOSITORIES --only 'fla #1135' 'aiter #3498'    some of them
    python tools/threads.py --table docs/threads.json                        the tables of docs/threads.md

REPOSITORIES has clones, in folders with the names of their repositories. Releases of vLLM and SGLang are
fetched from the package index (`attnlab fetch`). A row of tools/threads.toml:

- ``source``, ``control``: "repository@commit", or "library==release"; ``path``: the files of a repository.
  ``control`` is sound; without it, it is the source without the edits.
- ``edits``: expressions that become others, each with its file: the fault in another kernel or commit.
  ``repairs``: likewise, what makes the control sound.
- ``command``: words of attnlab. {source} is the folder, {call} a call made by ``model``, a function of
  tools/threads_models.py, which computes in torch what the thread says that a closed kernel does.
- ``control_command``: the words that change nothing, where the source has no sound form.
- ``expect``: a regular expression. A fault is found if the command prints it for the fault, and not for the
  control. ``result`` "partly" or "not" with ``why`` stays as it is written.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

from attnlab.checker.case_run import versions
from attnlab.kernels.vllm.source import fetched, fetched_wheel
from attnlab.library.op import package_of

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).with_suffix(".toml")
_LIMIT_S = 900


def folder_of(text: str, path: str, repositories: Path, to: Path) -> Path:
    """Unpack "repository@commit" or "library==release" into a folder."""
    to.mkdir(parents=True)
    if "@" in text:
        name, commit = text.split("@")
        command = ["git", "-C", str(repositories / name), "archive", commit, *path.split()]
        with tarfile.open(fileobj=BytesIO(subprocess.check_output(command))) as archive:
            archive.extractall(to, filter="data")
        return to
    library, release = text.split("==")
    package = package_of(library)
    found = fetched_wheel(release, package) or fetched(release, package)
    if found is None:
        words = ["fetch", release, *(() if library == "vllm" else ("--library", library))]
        found = Path(attnlab(words).stdout.split()[-1])
    if found.is_dir():
        return shutil.copytree(found, to, dirs_exist_ok=True)
    with zipfile.ZipFile(found) as wheel:
        names = [one for one in wheel.namelist() if re.search(r"\.py$|\.json$|METADATA$", one)]
        wheel.extractall(to, names)
    return to


def attnlab(words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run attnlab."""
    environment = {**os.environ, "COLUMNS": "400", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "attnlab", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=_LIMIT_S,
        **more,
    )


def made_call(name: str, fault: bool, folder: Path) -> Path:
    """Write the call of a model of tools/threads_models.py; return its file."""
    import threads_models

    target = folder / f"{name}-{'fault' if fault else 'sound'}.safetensors"
    threads_models.make(name, fault).save(target)
    return target


def run(row: dict[str, Any], repositories: Path, folder: Path) -> dict[str, Any]:
    """Run a row's command on the fault and on its control; return the row with the result."""
    outputs = []
    for is_fault in (True, False):
        place, words = {}, row["command"]
        if "source" in row:
            text = row["source"] if is_fault else row.get("control", row["source"])
            source = folder_of(text, row.get("path", ""), repositories, folder / str(is_fault))
            plant(row.get("edits" if is_fault else "repairs", []), source)
            place["source"] = str(source)
        if "model" in row:
            place["call"] = str(made_call(row["model"], is_fault, folder))
        if not is_fault:
            words = row.get("control_command", words)
        outputs.append(attnlab([word.format(**place) for word in words]))
    fault, control = (one.stdout + one.stderr for one in outputs)
    said = [" ".join(one.split()) for one in fault.splitlines() if re.search(row["expect"], one)]
    is_found = bool(said) and not re.search(row["expect"], control)
    found = {"result": row.get("result", "found") if is_found else "not", "said": said[:1]}
    if not is_found:
        found["why"] = row.get("why") or f"printed: {fault[-300:]!r}; control: {control[-300:]!r}"
    return {**row, **found, "exit_codes": [one.returncode for one in outputs]}


def plant(edits: list[list[str]], source: Path) -> None:
    """Change expressions in files; each must be there."""
    for file, before, after in edits:
        text = (source / file).read_text()
        if before not in text:
            raise SystemExit(f"{file} has no {before!r}")
        (source / file).write_text(text.replace(before, after))


def table(document: dict[str, Any]) -> str:
    """Return the rows of the tables: threads that ran, and the others."""
    ran = [one for one in document["threads"] if "command" in one]
    rest = [one for one in document["threads"] if "command" not in one]
    lines = [
        "| thread | kind | what is wrong | rebuilt from | command | result |",
        "|---|---|---|---|---|---|",
    ]
    for one in ran:
        said = "; ".join(one.get("said", [])) or one.get("why", "")
        said = said if len(said) < 220 else said[:216] + " …"
        lines.append(
            f"| [{one['thread']}]({one['url']}) | {one['kind']} | {one['wrong']} | {one['rebuilt']} | "
            f"`{_short(one['command'])}` | {one['result']}: {said.replace('|', '/')} |"
        )
    lines += ["", "| thread | kind | what is wrong | result | why |", "|---|---|---|---|---|"]
    for one in rest:
        lines.append(
            f"| [{one['thread']}]({one['url']}) | {one['kind']} | {one['wrong']} | {one['result']} | "
            f"{one['why']} |"
        )
    return "\n".join(lines)


def _short(words: list[str]) -> str:
    """Return a command with its op alone; all words are in tools/threads.toml."""
    op = words[words.index("--op") + 1 :][:1] if "--op" in words else []
    call = ["--call"] if "--call" in words else []
    return " ".join([words[0], *call, *op])


def main() -> None:
    """Run the threads, and write the results after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("repositories", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", default=[], metavar="THREAD")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    if args.repositories is None:
        parser.error("repositories must be a folder with clones, got none")
    rows = tomllib.loads(ROWS.read_text())["thread"]
    known = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"threads": []}
    done = {one["thread"]: one for one in known["threads"]}
    for row in rows:
        if args.only and row["thread"] not in args.only:
            continue
        if "command" in row:
            with tempfile.TemporaryDirectory() as folder:
                row = run(row, args.repositories, Path(folder))
            row["date"] = time.strftime("%Y-%m-%d", time.gmtime())
            print(
                row["thread"], row["result"], row.get("said"), row.get("why", ""), file=sys.stderr
            )
        done[row["thread"]] = row
        ordered = [done[one["thread"]] for one in rows if one["thread"] in done]
        if args.out:
            text = json.dumps(
                {"versions": versions(), "threads": ordered}, indent=1, ensure_ascii=False
            )
            args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
