"""A notebook for a new investigation: its cells, with what the experiments find as expected verdicts."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.output_file import write_text
from attnlab.case.platforms import machine_platform
from attnlab.diagnosis.captured import diagnose_any, violations_of
from attnlab.kernels.runner import runners
from attnlab.lab.lab import Lab
from attnlab.recorder.dumps import read_call
from attnlab.replay.probe import probe_call
from attnlab.replay.random_comparison import compare_backends
from attnlab.replay.shrinking import shrink_call
from attnlab.tensors.call import KernelCall
from attnlab.weights.codes import num_slots
from attnlab.weights.conclude import xray
from attnlab.weights.measurement import MOST_WEIGHTS

_DRAWN = 50  # random cases, to find one in which a kernel is wrong
_STEPS = 5
OnStep = Callable[[str, int, int], None]
_SIZES = ("sequences", "rows", "heads")
_KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What an investigation starts from: a Case, or the file of a call; and what runs it.

    ``source``: a vLLM, "" for the installed one; ``kernel``: a user's kernel, or "" for that vLLM's op.
    """

    case: Case | None
    call: Path | None
    source: str = ""
    kernel: str = ""

    @property
    def where(self) -> dict[str, str]:
        """Return the arguments that name the kernel."""
        if self.kernel:
            return {"backend": self.kernel}
        return {"backend": "vllm", **({"source": self.source} if self.source else {})}

    def seen_from(self, folder: Path) -> "Start":
        """Return the start with the paths of its files relative to a folder, where the notebook runs."""

        def relative(path: Path | str) -> str:
            return os.path.relpath(Path(path).expanduser().resolve(), folder.resolve())

        file, ending, function = self.kernel.partition(".py:")
        return replace(
            self,
            call=None if self.call is None else Path(relative(self.call)),
            source=relative(self.source)
            if Path(self.source).exists() and self.source
            else self.source,
            kernel=f"{relative(file)}{ending}{function}" if ending else self.kernel,
        )


def read_start(
    text: str, *, kernel: str, source: str, stage: str | None, is_full: bool = False
) -> Start:
    """Return what a user names: a file of a call or of a Case, a pytest id, or a kernel.

    The Case of a pytest id is reduced unless ``is_full``. Raises InvalidCase for a kernel that is right in
    50 random cases.
    """
    if kernel and source:
        raise InvalidCase("source must not be given with kernel")
    path = Path(text).expanduser()
    if "[" in text or text.startswith("test_"):
        fields = {} if stage is None else {"stage": stage}
        case = Case.from_test_id(text, **fields)
        case = case if is_full else case.reduced()
    elif path.suffix == ".json" and path.is_file():
        case = Case.from_json(path.read_text(encoding="utf-8"))
    elif path.exists():
        return Start(case=None, call=path, source=source, kernel=kernel)
    else:
        return Start(case=_wrong_case(text), call=None, kernel=text)
    return Start(case=case, call=None, source=source, kernel=kernel)


def _wrong_case(kernel: str) -> Case:
    """Return a random Case in which a user's kernel is wrong."""
    (mine,), (model,) = runners([], [kernel]), runners([], ["model"])
    backends = (mine.find(), model.find())
    platform = machine_platform() or "sm_90"
    found = compare_backends(
        backends, (kernel, "model"), op=backends[0].ops[0], platform=platform, count=_DRAWN, seed=0
    )
    for one in found.cases:
        if one.outcomes[0].is_wrong:
            return one.case
    raise InvalidCase(f"{kernel} must be wrong in a random case, got {len(found.cases)} right ones")


def next_notebook(folder: Path, name: str) -> Path:
    """Return the path of a new notebook: the next number, and the name as a slug."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    known = sorted(folder.glob("[0-9][0-9]-*.ipynb"))
    if not slug:
        raise InvalidCase(f"name must have letters or digits, got {name!r}")
    if any(path.stem[3:] == slug for path in known):
        raise InvalidCase(f"name must be new, got {name!r}, which {folder} has")
    number = int(known[-1].stem[:2]) + 1 if known else 1
    return folder / f"{number:02}-{slug}.ipynb"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the experiments find, which the notebook expects again."""

    cause: str
    sentences: tuple[str, ...]
    status: str
    sizes: list[int]
    violations: list[str]
    xray: str
    xray_of: str
    weights: str
    probe: str
    suspects: tuple[str, ...]


def experiments(start: Start, call: KernelCall, lab: Lab, on_step: OnStep) -> _Found:
    """Run the experiments of the notebook. Raises AttnLabError if the call does not fail."""
    where: dict[str, Any] = start.where
    on_step("shrinking the call", 0, _STEPS)
    small = shrink_call(call, **where)
    if not small.is_failing:
        raise AttnLabError(f"an investigation needs a call that fails: {small.sentences()[0]}")
    on_step("searching the cause", 1, _STEPS)
    found = diagnose_any(call, locate=False, **where)
    on_step("measuring weights", 2, _STEPS)
    of = "call" if _is_small(call) else "small.call"
    subject = call if _is_small(call) else small.call
    seen = xray(subject, backend=start.where["backend"], lab=lab)
    on_step("varying the call", 3, _STEPS)
    return _Found(
        cause="" if found.cause is None else found.cause.name,
        sentences=tuple(found.sentences()),
        status=found.status,
        sizes=[small.after[name] for name in _SIZES],
        violations=[one.kind for one in violations_of(call) if one.effect != "harmless"],
        xray=seen.status,
        xray_of=of,
        weights=seen.sentences[0],
        probe=probe_call(small.call, **where).verdict,
        suspects=tuple(f"*{one.name}*: {one.text}." for one in found.candidates[:3]),
    )


def _is_small(call: KernelCall) -> bool:
    """Return whether an X-ray of every row and head takes seconds."""
    rows, heads = call.query.shape[:2]
    return rows * heads * num_slots(call) <= MOST_WEIGHTS


def notebook_text(start: Start, title: str, found: _Found) -> str:
    """Return a notebook in the order of this project's post-mortems."""
    cells = [_cell(kind, text, i) for i, (kind, text) in enumerate(_cells(start, title, found))]
    metadata = {"kernelspec": _KERNELSPEC, "language_info": {"name": "python"}}
    document = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def write_notebook(path: Path, start: Start, title: str, on_step: OnStep) -> _Found:
    """Run the experiments, write the notebook and run it; ``on_step(text, done, total)`` hears of each."""
    lab = Lab(source=Path(start.source)) if start.source else Lab()
    if start.call is not None:
        call = read_call(start.call)
    else:
        assert start.case is not None
        call = lab.run(start.case.replace(backend=start.where["backend"])).recorded_call
    found = experiments(start, call, lab, on_step)
    write_text(path, notebook_text(start.seen_from(path.parent), title, found))
    on_step("running the notebook", 4, _STEPS)
    run_notebook(path)
    return found


def run_notebook(path: Path) -> None:
    """Run a notebook in its folder and keep its outputs. Raises AttnLabError if a cell raises."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=None, resources=where, record_timing=False)
    try:
        client.execute(stderr=subprocess.DEVNULL)
    except CellExecutionError as error:
        raise AttnLabError(f"{path} does not run: {error.ename}: {error.evalue}") from error
    except DeadKernelError as error:
        text = f"{path} does not run: its kernel ended, which happens if memory is short"
        raise AttnLabError(text) from error
    finally:
        nbformat.write(notebook, path)


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    """Return a cell of nbformat; kind is md, code, parameters or hidden."""
    tags = {"tags": ["parameters"]} if kind == "parameters" else {}
    hidden = {"jupyter": {"source_hidden": True}} if kind in ("parameters", "hidden") else {}
    cell: dict[str, Any] = {
        "cell_type": "markdown" if kind == "md" else "code",
        "id": f"cell-{number:02}",
        "metadata": {**hidden, **tags},
        "source": text.strip("\n").splitlines(keepends=True),
    }
    return cell if kind == "md" else {**cell, "execution_count": None, "outputs": []}


def _cells(start: Start, title: str, found: _Found) -> list[tuple[str, str]]:
    """Return the cells in their order: kind and text."""
    suspects = "\n".join(f"{i}. {text}" for i, text in enumerate(found.suspects, 1))
    return [
        ("md", f"# {title}\n\n**Verdict.** {_sentence(found.sentences[0])}"),
        ("parameters", _parameters(start)),
        ("hidden", _set_up(start)),
        ("md", "## Symptom\n\nWe run the recorded call again. We expect a mismatch."),
        ("code", _SYMPTOM.format(call=_call(start), replay=_replay(start))),
        ("code", "attnlab.plot(result);"),
        ("md", "## Smallest reproduction\n\nWe shrink the call as long as the fault stays."),
        ("code", _SHRINK.format(sizes=found.sizes)),
        ("md", "## The contract\n\nA call that violates its contract is not the kernel's fault. "
               f"We expect {' and '.join(found.violations) or 'no violation'}."),
        ("code", _CONTRACT.format(violations=found.violations)),
        ("md", f"## Suspects\n\n{suspects or '1. A fault that is not in the catalogue.'}"),
        ("md", "## Experiment 1: the catalogue\n\nEach known fault predicts an output. "
               f"We expect *{found.cause or found.status}*."),
        ("code", _DIAGNOSE.format(cause=found.cause or None, status=found.status)),
        ("md", "## Experiment 2: the weights themselves\n\nThe X-ray measures every weight with coded "
               f"values, without a catalogue. We expect *{found.xray}*: {found.weights}."),
        ("code", _XRAY.format(status=found.xray, call=found.xray_of)),
        ("code", "attnlab.plot(xray);"),
        ("md", "## Experiment 3: corruption, or another order of sums?\n\n"
               f"Variations of the call must not change the result. We expect *{found.probe}*."),
        ("code", _PROBE.format(verdict=found.probe)),
        ("md", "## Cause\n\nThe line, and why it is wrong, in at most ten lines."),
        ("md", "## The fix under the same check\n\nRun the same call on the repaired kernel: "
               "`attnlab.replay_call(call, backends=[…])`."),
        ("md", "## Why the tests missed it\n\n## Blast radius\n\n## Unknown\n\n## Sources"),
        ("hidden", _POST_MORTEM),
        ("code", _CONCLUDE),
    ]  # fmt: skip


def _sentence(text: str) -> str:
    """Return a text as a sentence; a name keeps its case."""
    first = text.partition(" ")[0]
    return f"{text if '_' in first else text[0].upper() + text[1:]}."


def _parameters(start: Start) -> str:
    if start.kernel:
        return f"kernel = {start.kernel!r}  # FILE.py:FUNCTION"
    return f"source = {start.source!r}  # a vLLM: a wheel, an sdist or a checkout; '' takes the installed one"


def _set_up(start: Start) -> str:
    where = (
        '{"backend": kernel}' if start.kernel else '{"backend": "vllm", "source": source or None}'
    )
    lab = "attnlab.Lab()" if start.kernel else "attnlab.Lab(source=source or None)"
    return f"""import attnlab
from attnlab.replay.replay_call import call_result
from attnlab.reports.notebook_result import PostMortem
from attnlab.show.notebook import provenance

verdicts, where = attnlab.Verdicts(), {where}
lab = {lab}"""


def _call(start: Start) -> str:
    if start.call is not None:
        return f"call = attnlab.read_call({str(start.call)!r})"
    assert start.case is not None
    fields = {name: value for name, value in start.case.changes().items() if name != "backend"}
    given = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    return f'case = attnlab.Case({given}, backend=where["backend"])\ncall = lab.run(case).recorded_call'


def _replay(start: Start) -> str:
    return (
        "backends=[kernel]"
        if start.kernel
        else 'backends=["vllm"], sources=[source] if source else []'
    )


_SYMPTOM = """{call}
replayed = attnlab.replay_call(call, {replay})
verdicts.record("the output", expected="mismatch", found=replayed.replays[0].status)
result = call_result(call, **where)
result"""
_SHRINK = """small = attnlab.shrink_call(call, **where)
sizes = [small.after[name] for name in ("sequences", "rows", "heads")]
verdicts.record("sequences, rows, heads", expected={sizes}, found=sizes)
small"""
_CONTRACT = """violated = [one.kind for one in attnlab.violations(call) if one.effect != "harmless"]
verdicts.record("violations", expected={violations}, found=violated)"""
_DIAGNOSE = """found = attnlab.diagnose(call, locate=False, **where)
cause = found.cause and found.cause.name
verdicts.record("diagnosis", expected=[{status!r}, {cause!r}], found=[found.status, cause])
found"""
_XRAY = """xray = attnlab.xray({call}, backend=where["backend"], lab=lab)
verdicts.record("X-ray", expected={status!r}, found=xray.status)
xray"""
_PROBE = """probe = attnlab.probe_call(small.call, **where)
verdicts.record("probe", expected={verdict!r}, found=probe.verdict)
probe"""
_POST_MORTEM = """PostMortem(
    failed=f"{found.wrong_rows} of {found.looked_at[1]} rows",
    where=str(call.origin) or "this machine",
    since="unknown",
    cause=found.sentences()[0],
    fix="none yet",
    status="open",
)"""
_CONCLUDE = """provenance(backends=[str(one.backend) for one in replayed.replays])
verdicts.conclude()"""
