"""A check of many releases: what runs, what they share, and the state of each release for a fault."""

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from helpers.commands import error_line

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.checker.releases import (
    Release,
    ReleasePlan,
    ReleaseTable,
    build_table,
    check_releases,
    fault_rows,
    merged_releases,
    op_digest,
)
from attnlab.cli.main import main
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.reports.check_pages import write_releases
from attnlab.tasks.store import Shard
from attnlab.tasks.task import CRASH, DONE, NOT_RUN, Engine, Outcome, Task

OPS = ("unified_attention", "merge_attn_states")
UNIFIED = "from vllm.v1.attention.ops.helper import f\n\n\ndef unified_attention():\n    pass\n"


def _release(folder: Path, version: str, **files: str) -> Release:
    ops = folder / version / "vllm" / "v1" / "attention" / "ops"
    ops.mkdir(parents=True)
    (folder / version / "PKG-INFO").write_text(f"Version: {version}\n")
    for name, text in files.items():
        (ops / f"{name}.py").write_text(text)
    return Release(
        version=version, backend=VllmBackend(path=folder / version, requested_device="cpu")
    )


@pytest.fixture
def plan(tmp_path: Path) -> ReleasePlan:
    """Return the plan of five releases.

    0.12.0 and 0.13.0 have the same unified_attention; 0.14.0 changes only a file that it imports; 0.15.0
    changes a file that it does not import and adds merge_attn_states; 0.16.0 removes unified_attention.
    """
    unified = {"triton_unified_attention": UNIFIED}
    merge = {"triton_merge_attn_states": "def merge_attn_states():\n    pass\n"}
    releases = (
        _release(tmp_path, "0.12.0", **unified, helper="f = 1\n"),
        _release(tmp_path, "0.13.0", **unified, helper="f = 1\n"),
        _release(tmp_path, "0.14.0", **unified, helper="f = 2\n"),
        _release(tmp_path, "0.15.0", **unified, helper="f = 2\n", other="g = 1\n", **merge),
        _release(tmp_path, "0.16.0", **merge),
    )
    return ReleasePlan(releases=releases, ops=OPS, cases=3, horizon=False)


def test_an_op_runs_once_for_releases_that_share_it(plan: ReleasePlan) -> None:
    """The digest covers the files that the op imports, and no others."""
    unified, merge = OPS
    assert plan.runs == {
        "0.12.0": {unified: "0.12.0"},
        "0.13.0": {unified: "0.12.0"},
        "0.14.0": {unified: "0.14.0"},
        "0.15.0": {unified: "0.14.0", merge: "0.15.0"},
        "0.16.0": {merge: "0.15.0"},
    }
    assert len(plan.tasks()) == 3 * 3  # of nine ops, three run


def test_the_rules_of_a_release_are_part_of_the_digest(tmp_path: Path) -> None:
    """The same file is judged by other rules up to 0.11."""
    old, new = (
        _release(tmp_path, version, triton_unified_attention=UNIFIED)
        for version in ("0.11.2", "0.12.0")
    )
    digests = [op_digest(release.backend.source, OPS[0]) for release in (old, new)]
    assert None not in digests
    assert digests[0] != digests[1]


def _verdict(task: Task, *diagnoses: str, **changed: object) -> Outcome:
    case = task.payload["case"]
    findings = [
        {"op": case["op"], "kind": "wrong_output", "evidence": "", "diagnosis": d, "case": case}
        for d in diagnoses
    ]
    verdict = {"ran": True, "findings": findings, "unsupported": "", "not_run": "", "reads": None}
    return Outcome(key=task.key, status=DONE, verdict={**verdict, **changed}, seconds=1.0)


Kernel = Callable[[Case], Sequence[str] | str]


@dataclass
class FakeEngine(Engine):
    """Runs "kernels": by release, a function of a Case that returns its diagnoses, or why it is unsupported.

    A finding shrinks to one token without context if the kernel shows the same diagnosis there.
    ``most``: how many tasks it runs before the time is up; ``devices``: the device of each run.
    """

    kernels: Mapping[str, Kernel]
    most: int = 1000
    devices: list[str] = field(default_factory=list)

    def run(self, job, tasks, on_outcome, stop=None, is_late=None):
        self.devices.append(job.device)
        for task in tasks:
            self.most -= 1
            if self.most >= 0:
                on_outcome(self._outcome(task))

    def _outcome(self, task: Task) -> Outcome:
        kernel = self.kernels[task.payload["library"]]
        if "finding" in task.payload:
            finding = dict(task.payload["finding"])
            small = {**finding["case"], "query_lens": [1], "ctx_lens": [0], "num_blocks": None}
            if finding["diagnosis"] in kernel(Case.from_dict(small)):
                finding["case"] = small
            return Outcome(key=task.key, status=DONE, verdict={"finding": finding})
        answer = kernel(Case.from_dict(task.payload["case"]))
        if isinstance(answer, str) and answer == "crash":
            return Outcome(key=task.key, status=CRASH, text="ended")
        if isinstance(answer, str) and answer == "no memory":
            return Outcome(key=task.key, status=NOT_RUN, text=answer)
        if isinstance(answer, str):
            return _verdict(task, ran=False, unsupported=answer)
        return _verdict(task, *answer)

    def close(self) -> None:
        pass


def sound(case: Case) -> list[str]:
    return []


def wrong(*diagnoses: str, if_op: str = OPS[0]) -> Kernel:
    """Return a kernel with faults in every case of an op."""
    return lambda case: list(diagnoses) if case.op == if_op else []


def _states(table: ReleaseTable) -> list[tuple[str, str]]:
    """Return the diagnosis and the first letters of the cells of each fault."""
    return [
        (fault.finding.diagnosis, "".join(state[0] for state in fault.cells.values()))
        for fault in table.faults
    ]


def _table(plan: ReleasePlan, kernels: Mapping[str, Kernel], **options: object) -> ReleaseTable:
    engine = FakeEngine(kernels={version: sound for version in plan.runs} | dict(kernels))
    return check_releases(plan, engine, **options)


def test_one_fault_is_one_row(plan: ReleasePlan) -> None:
    """Of two releases with the same op one runs. An absent op and a right one have different states."""
    table = _table(plan, {"0.12.0": wrong("a")})
    assert _states(table) == [("a", "ffssa")]
    assert table.faults[0].finding.case.query_lens == (1,)
    assert _states(_table(plan, {"0.12.0": wrong("a"), "0.14.0": wrong("a")})) == [("a", "ffffa")]
    assert _states(_table(plan, {"0.14.0": wrong("a")})) == [("a", "ssffa")]


def test_a_row_states_only_releases_where_its_case_is_wrong(plan: ReleasePlan) -> None:
    """Two faults have one name; the smallest case of the first is right in 0.14.0, that of the second is
    wrong in both."""
    kernels = {
        "0.12.0": lambda case: ["described"] if case.op == OPS[0] else [],
        "0.14.0": lambda case: (
            ["described"] if case.op == OPS[0] and sum(case.query_lens) > 1 else []
        ),
    }
    assert _states(_table(plan, kernels)) == [("described", "ffssa"), ("described", "ffffa")]


def test_a_fault_that_another_release_names_otherwise_has_a_row_of_its_own(
    plan: ReleasePlan,
) -> None:
    """The same case shows another fault there. A status, however, is no other fault."""
    table = _table(plan, {"0.12.0": wrong("a"), "0.14.0": wrong("b")})
    assert _states(table) == [("a", "ffooa"), ("b", "ooffa")]
    table = _table(plan, {"0.12.0": wrong("a"), "0.14.0": wrong("unexplained")})
    assert _states(table) == [("a", "ffffa")]


def test_two_faults_of_a_release_with_one_smallest_case_are_one_row(plan: ReleasePlan) -> None:
    """A case has one output."""
    assert _states(_table(plan, {"0.12.0": wrong("a", "b")})) == [("a", "ffssa")]


def test_a_crash_a_limit_and_another_fault_have_states(plan: ReleasePlan) -> None:
    """The kernel of 0.14.0 ends its process, that of 0.15.0 states a limit."""
    merge = lambda case: "no such merge"  # noqa: E731
    table = _table(plan, {"0.12.0": wrong("a"), "0.14.0": lambda case: "crash", "0.15.0": merge})
    assert _states(table) == [("a", "ffooa"), ("crash", "ooffa")]
    assert [(entry.op, entry.reason, entry.cases) for entry in table.left_out] == [
        ("0.15.0 merge_attn_states", "no such merge", 3)
    ]
    limited = _table(plan, {"0.12.0": wrong("a"), "0.14.0": lambda case: "no sinks"})
    assert _states(limited) == [("a", "ffaaa")]


def test_every_case_is_accounted_for(plan: ReleasePlan) -> None:
    """Each case ran, is in not_run or is in left_out; a case without a verdict says why."""
    kernels = {"0.14.0": lambda case: "no sinks", "0.15.0": lambda case: "no memory"}
    table = _table(plan, kernels)
    parts = [sum(entry.cases for entry in part) for part in (table.not_run, table.left_out)]
    assert (table.cases, table.cases_run, *parts, table.exit_code) == (9, 3, 3, 3, 3)
    document = table.to_dict()
    assert document["left_out"][0]["reason"] == "no sinks"
    assert document["not_run"][0]["reason"] == "no memory"


@pytest.mark.parametrize("most", [1, 9, 10, 11])
def test_what_the_time_did_not_suffice_for_is_not_run(plan: ReleasePlan, most: int) -> None:
    """A fault is stated in the release where it ran; for others its smallest case is missing.

    Of 11 tasks, 9 are cases; then the fault is shrunk, and its smallest case runs in 0.14.0.
    """
    engine = FakeEngine(kernels={version: wrong("a") for version in plan.runs}, most=most)
    table = check_releases(plan, engine)
    two = [("a", "ffnna"), ("a", "nnffa")]
    assert _states(table) == {10: two, 11: [("a", "ffffa")]}.get(most, two[:1])
    assert bool(table.not_run) == (most < 11)
    assert table.exit_code == 1


def test_a_store_continues(plan: ReleasePlan, tmp_path: Path) -> None:
    """The runs of the rows are kept, too: the last of several commands runs nothing again."""
    kernels = {version: wrong("a") for version in plan.runs}
    for most in (9, 1, 1):
        table = check_releases(plan, FakeEngine(kernels=kernels, most=most), out=tmp_path / "s")
    assert _states(table) == [("a", "ffffa")]
    again = FakeEngine(kernels=kernels)
    assert check_releases(plan, again, out=tmp_path / "s").faults == table.faults
    assert again.devices == []


@pytest.mark.parametrize(
    ("kernels", "state", "text"),
    [
        (
            {"0.12.0": wrong("a"), "0.14.0": wrong("a")},
            "yes",
            "0.12.0: confirmed; 0.14.0: confirmed",
        ),
        ({"0.12.0": wrong("a")}, "no", "0.12.0: confirmed; 0.14.0: right"),
        (
            {"0.12.0": wrong("a"), "0.14.0": lambda case: "crash"},
            "not confirmed",
            "0.12.0: confirmed; 0.14.0: not confirmed, fails: crash (ended)",
        ),
        (
            {"0.12.0": lambda case: "no bfloat16", "0.14.0": wrong("a")},
            "yes",
            "0.12.0: not runnable, no bfloat16; 0.14.0: confirmed",
        ),
        (
            dict.fromkeys(("0.12.0", "0.14.0"), lambda case: "no memory"),
            "not runnable",
            "0.12.0: not runnable, no memory; 0.14.0: not runnable, no memory",
        ),
    ],
)
def test_a_gpu_confirms_the_faults(
    plan: ReleasePlan,
    tmp_path: Path,
    kernels: dict[str, Kernel],
    state: str,
    text: str,
) -> None:
    """The smallest case runs in the first and the last release that has the fault. The page states it."""
    native = FakeEngine(kernels={version: sound for version in plan.runs} | kernels)
    faulty = {"0.12.0": wrong("a"), "0.14.0": wrong("a")}
    table = _table(plan, faulty, native=native)
    assert native.devices == ["cuda"]
    (fault,) = table.faults
    assert (fault.is_native, fault.native_text) == (state, text)
    assert table.to_dict()["faults"][0]["native"] == state
    assert _table(plan, faulty).faults[0].is_native == "not tried"
    write_releases(tmp_path / "page.html", table)
    page = (tmp_path / "page.html").read_text()
    assert f'aria-label="on a GPU: {state}"' in page
    assert text in page


def test_merged_shards_give_the_table_of_the_whole(plan: ReleasePlan) -> None:
    """The header has the tasks, and no path of this machine."""
    tasks = plan.tasks()
    outcomes = {task.key: _verdict(task, "a") for task in tasks}
    assert fault_rows(plan.header(tasks), tasks, outcomes).pending
    whole = build_table(plan.header(tasks), tasks, outcomes, seconds=9.0, stopped="")
    header = {**plan.header(tasks, Shard(index=1, count=2)), "shard": "1/1"}
    assert merged_releases(header, outcomes).to_dict() == whole.to_dict()
    assert str(plan.releases[0].backend.path) not in str(header)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["0.12.0..0.17.0"], "releases must be one of 0.12.0, 0.13.0,"),
        (["--out", "full"], "out must be a new folder, an empty one or a store"),
        (["--op", "unified_attention", "--engine", "nothing"], "engine must be"),
        (["--times", "none"], "none must be a store"),
    ],
)
def test_wrong_arguments_are_one_line(
    plan: ReleasePlan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    words: str,
) -> None:
    """Exit code 2, and one line that names the field."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    sources = plan.releases[0].backend.path.parent
    (tmp_path / "other").mkdir()
    for path in sources.glob("0.*"):
        (tmp_path / "other" / path.name).symlink_to(path)
    line = error_line(capsys, ["releases", *argv, "--sources", "other"])
    assert line.startswith(f"attnlab: {words}")


def test_a_folder_that_has_a_release_twice_is_refused(
    tmp_path: Path, plan: ReleasePlan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both paths are named."""
    assert plan.releases
    (tmp_path / "again").symlink_to(tmp_path / "0.12.0")
    line = error_line(capsys, ["releases", "--sources", str(tmp_path)])
    assert line.startswith("attnlab: sources must have each release once, got 0.12.0 in ")
    assert f"{tmp_path / '0.12.0'} and {tmp_path / 'again'}" in line
    with pytest.raises(InvalidCase):
        op_digest(
            _release(tmp_path, "0.17.0", triton_unified_attention="def (").backend.source, OPS[0]
        )


def test_a_file_that_is_not_a_vllm_is_left_out(
    tmp_path: Path, plan: ReleasePlan, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named; a damaged archive is refused, because it may be a release."""
    assert plan.releases
    (tmp_path / "notes.txt").write_text("the releases")
    (tmp_path / "store").mkdir()
    argv = ["releases", "0.16.0", "--sources", str(tmp_path), "--op", "merge_attn_states"]
    assert main([*argv, "--cases", "1", "--engine", "local:1"]) in (1, 3)
    assert "because it is not a vLLM: notes.txt, store" in capsys.readouterr().err
    (tmp_path / "vllm-0.17.0.whl").write_text("no archive")
    line = error_line(capsys, argv)
    assert line.startswith(f"attnlab: {tmp_path / 'vllm-0.17.0.whl'}") or "source must" in line


def tool(name: str = "releases") -> ModuleType:
    """Return a file of tools/."""
    path = Path(__file__).parents[2] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_tool", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("native", "code", "words"),
    [
        (wrong("a"), 0, "on a GPU: yes 1"),
        (sound, 1, "on a GPU: no 1\nno: unified_attention, wrong_output, a"),
        (lambda case: "no bfloat16", 0, "on a GPU: not runnable 1"),
    ],
)
def test_the_tool_makes_the_page_of_two_releases(
    plan: ReleasePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    native: Kernel,
    code: int,
    words: str,
) -> None:
    """It runs the command itself, in which engines stand for the interpreter and the GPU."""
    kernels = {"0.12.0": wrong("a"), "0.14.0": wrong("a")}
    engine, gpu = FakeEngine(kernels=kernels), FakeEngine(kernels=dict.fromkeys(kernels, native))
    monkeypatch.setattr("attnlab.tasks.run.find_engine", lambda *args: engine)
    monkeypatch.setattr("attnlab.cli.releases._gpu", lambda *given: gpu)
    page = tmp_path / "page.html"
    words_of_command = [
        "0.12.0..0.14.0",
        "--cases",
        "2",
        "--op",
        OPS[0],
        "--out",
        str(tmp_path / "s"),
    ]
    argv = [
        *words_of_command,
        "--sources",
        str(plan.releases[0].backend.path.parent),
        "--page",
        str(page),
    ]
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(sys, "argv", ["releases.py", *argv, "--engine", "local:2"])
    assert tool().main() == code
    assert words in capsys.readouterr().out
    assert (engine.devices[0], gpu.devices) == ("cpu", ["cuda"])
    table = json.loads(page.with_suffix(".json").read_text())
    assert [fault["first"] for fault in table["faults"]] == ["0.12.0"]
    assert "Confirmed natively" in page.read_text()


def test_the_command_runs_with_its_defaults(
    plan: ReleasePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All cases of each op run unless --cases is given."""
    assert plan.releases
    engine = FakeEngine(kernels={"0.15.0": wrong("a", if_op=OPS[1])}, most=10**6)
    monkeypatch.setattr("attnlab.tasks.run.find_engine", lambda *args: engine)
    argv = ["releases", "--sources", str(tmp_path), "--op", OPS[1], "--json"]
    assert main(argv) == 1
    table = json.loads(capsys.readouterr().out)
    assert table["cases_run"] > 20
    assert [fault["diagnosis"] for fault in table["faults"]] == ["a"]
    engine.kernels = {"0.15.0": sound}
    assert main(argv) == 0
