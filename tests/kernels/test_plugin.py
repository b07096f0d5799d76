"""A user's kernel is a backend: every command runs it, and reports a planted fault."""

import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import refused
from helpers.plugins import EXAMPLES, RIGHT, planted
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.flags import typed
from attnlab.cli.main import main
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import find_backend
from attnlab.lab.lab import Lab

SPEC = f"{EXAMPLES / 'my_attention.py'}:my_attention"
TRITON = f"{EXAMPLES / 'my_triton_attention.py'}:my_attention"
DOUBLED = RIGHT.replace("* scale", "* 2 * scale")
SMALL = {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 64,
    "block_size": 16,
    "query_lens": (1, 17, 3),
    "ctx_lens": (20, 0, 16),
    "distribution": "normal",
    "atol": 1e-2,
}
FLAGS = [
    *("--num-heads", "4", "--num-queries-per-kv", "2", "--head-size", "64", "--block-size", "16"),
    *("--query-lens", "1,17,3", "--ctx-lens", "20,0,16", "--distribution", "normal"),
    *("--fill", "all_rows", "--atol", "0.01"),
]


def small(spec: str, **changes) -> Case:
    """Return a small sound Case of a plugin."""
    return Case(**{**SMALL, "op": find_backend(spec).ops[0], "backend": spec, **changes})


@pytest.fixture
def doubled(tmp_path: Path) -> str:
    """Return the spec of the example with a scale that is twice too large."""
    return planted(tmp_path, DOUBLED).name


def document(arguments: list[str], capsys) -> tuple[int, dict]:
    """Return the exit code and the JSON document of a command."""
    return main([*arguments, "--json"]), json.loads(capsys.readouterr().out)


def test_run(doubled, capsys):
    code, found = document(["run", "--backend", SPEC, *FLAGS], capsys)
    assert (code, found["status"], found["backend"]) == (0, "match", SPEC)
    assert found["case"]["op"] == "unified_attention"  # the op that the function declares
    code, found = document(["run", "--backend", doubled, *FLAGS], capsys)
    assert (code, found["status"], found["backend"]) == (1, "mismatch", doubled)
    assert {place["seq"] for place in found["places"]} == {0, 1, 2}  # all rows of the op


def test_stages(doubled, capsys):
    flags = [flag for flag in FLAGS if flag not in ("--fill", "all_rows")]
    _, found = document(["run", "--stages", "--backend", SPEC, *flags], capsys)
    right = {cell["stage"]: cell["mismatched"] for cell in found["cells"]}
    assert {cell["platform"] for cell in found["cells"]} == {Case().platform}
    assert right["sound"] == 0
    assert right["cast_after_cumsum"] > 0  # its new tokens are not in the cache
    code, found = document(["run", "--stages", "--backend", doubled, *flags], capsys)
    wrong = {cell["stage"]: cell["mismatched"] for cell in found["cells"]}
    assert code == 1
    assert wrong["sound"] > 0


def test_diagnose(doubled, capsys):
    code, found = document(["diagnose", "--backend", SPEC, *FLAGS], capsys)
    assert (code, found["status"]) == (0, "nothing wrong")
    code, found = document(["diagnose", "--backend", doubled, *FLAGS], capsys)
    assert (code, found["cause"]["name"]) == (1, "scale_doubled")


def test_power_runs_the_proposal_on_the_kernel(doubled, capsys):
    flags = ["--atol", "1.0", "--distribution", "uniform_1e-3"]
    passes = {}
    for spec in (SPEC, doubled):
        _, found = document(["power", "--backend", spec, *FLAGS, *flags], capsys)
        assert found["proposal"]
        passes[spec] = found["models_pass"]
    assert passes == {SPEC: True, doubled: False}


def test_a_notebook_gets_an_absolute_path(monkeypatch):
    """Notebooks run in a folder of their own."""
    monkeypatch.chdir(EXAMPLES)
    assert typed("backend", "my_attention.py:my_attention", "model") == SPEC
    assert typed("backend", "plugin:mine", "model") == "plugin:mine"
    assert typed("backend", "rocm", "model") == "rocm"


def test_the_explorer(doubled):
    pytest.importorskip("ipywidgets")
    from attnlab.show.panels import explorer

    view = explorer(small(SPEC))
    assert view.show().status == "match"
    assert view.case.backend == SPEC
    assert view.show(backend=doubled).status == "mismatch"
    assert view.show(backend="model").status == "match"


@needs_triton
def test_reads_of_a_triton_kernel_are_traced(tmp_path):
    result = Lab().run(small(TRITON, trace_reads=True))
    assert (result.status, result.launches) == ("match", ("row_kernel[21, 4]",))
    assert {slots.seq for slots in result.memory.slots} == {0, 1, 2}
    assert Lab().run(small(SPEC, trace_reads=True)).memory is None  # torch: no launch to trace
    stray = Path(TRITON.rpartition(":")[0]).read_text().replace("pos <= end", "pos <= end + 1")
    wide = planted(tmp_path, stray).name
    clean, found = (Lab().run(small(spec, trace_reads=True)).memory for spec in (TRITON, wide))
    kinds = ("own future", "unwritten tail")
    assert sum(clean.total(kind) for kind in kinds) < sum(found.total(kind) for kind in kinds)


def test_an_exception_of_the_kernel_is_its_failure(tmp_path):
    spec = planted(tmp_path, RIGHT.replace("[:seq_len]", "[: seq_len + 8]")).name
    result = Lab().run(small(spec))
    assert (result.status, result.failed) == ("rejected", True)
    assert diagnose(small(spec), lab=Lab()).status == "rejected"


def test_a_call_that_the_kernel_does_not_support(tmp_path):
    spec = planted(tmp_path, "def my_attention(call): raise NotImplementedError('no')\n").name
    with pytest.raises(Unavailable):
        Lab().run(small(spec))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"op": "context_attention_fwd"}, "op"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"backend": "missing.py:f"}, "backend"),
        ({"backend": "plugin:missing"}, "backend"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(changes, field):
    lab = Lab()
    with refused(field):
        lab.run(small(SPEC).replace(**changes))
    assert not lab.shared.count("batch")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other(call): pass", "must have a function"),
        ("raise ValueError('no')", "cannot run: kernel.py:1: ValueError: no"),
        ("def my_attention(call): pass\nmy_attention.op = 'mine'", "op must be one of"),
        ("my_attention = 3", "must have a function"),
    ],
)
def test_a_file_without_a_kernel(tmp_path, text, words):
    with pytest.raises(InvalidCase, match=words):
        planted(tmp_path, text)


def test_a_file_can_import_its_neighbours(tmp_path):
    """When it is loaded, and when it is called."""
    (tmp_path / "neighbour_of_mine.py").write_text("from later_neighbour import f\n")
    (tmp_path / "later_neighbour.py").write_text("f = 1\n")
    file = tmp_path / "mine.py"
    file.write_text("def f(call):\n    import neighbour_of_mine\n    call.output.zero_()\n")
    case = Case(**{**SMALL, "backend": f"{file}:f"})
    assert Lab().run(case).status == "mismatch"


def test_an_entry_point(monkeypatch, tmp_path):
    """A package in the group attnlab.kernels names its function; the module may use relative imports."""
    package = tmp_path / "installed_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "right.py").write_text(RIGHT)
    (package / "ops.py").write_text("from .right import my_attention as fast\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint(
        name="fast", value="installed_kernels.ops:fast", group="attnlab.kernels"
    )
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == point.group else []
    )
    result = Lab().run(small("plugin:fast"))
    assert (result.status, result.backend) == ("match", "plugin:fast")


def test_a_file_that_changes_within_a_second_is_loaded_again(tmp_path, monkeypatch):
    """Python takes bytecode for current if size and second of the file are the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "kernel.py"
    for number in (1, 2):
        file.write_text(f"def my_attention(call):\n    return {number}\n")
        os.utime(file, ns=(0, 10**18 + number))
        assert find_backend(f"{file}:my_attention").kernel(None) == number


def test_a_backend_can_be_sent_to_another_process():
    for name in ("model", "vllm", "rocm", "vllm-cpu", SPEC):
        backend = find_backend(name)
        again = pickle.loads(pickle.dumps(backend))
        assert (again.name, again.ops, again.path) == (name, backend.ops, backend.path)


_ADAPTER = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import project_kernels


def my_attention(call):
    project_kernels.my_attention(call)


my_attention.op = "unified_attention"
my_attention.kv_cache_dtypes = ("auto",)
"""


@pytest.mark.slow
@needs_triton
def test_kernels_of_an_imported_module_are_interpreted(tmp_path):
    """With TRITON_INTERPRET=0, an adapter of kernels elsewhere is checked, and its reads are traced."""
    example = Path(__file__).parents[2] / "examples" / "my_triton_attention.py"
    (tmp_path / "project_kernels.py").write_text(example.read_text())
    (tmp_path / "mine.py").write_text(_ADAPTER)
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "attnlab", "check", f"{tmp_path / 'mine.py'}:my_attention"]
    command += ["--cases", "4", "--engine", "local:1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    report = json.loads(done.stdout)
    assert report["findings"] == [], done.stderr
    assert report["cases_run"] == 4
    assert report["reads"]["unified_attention"]
    assert done.returncode == 0


@needs_triton
def test_a_check_that_launches_nothing_says_how_to_run_it(tmp_path, capsys, monkeypatch):
    """If Triton was imported to compile, one line names the variable; the kernel has not failed.

    If no case of a check ran for want of the interpreter, there is no report: one line, and exit code 2.
    """
    file = tmp_path / "mine.py"
    file.write_text(
        "def fn(call):\n    raise RuntimeError('0 active drivers ([]). There should only be one.')\n"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="TRITON_INTERPRET=1"):
        Lab().run(small(f"{file}:fn"))
    assert main(["check", f"{file}:fn", "--cases", "2", "--engine", "local:1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (
        printed.err.strip()
        .splitlines()[-1]
        .endswith("set TRITON_INTERPRET=1 before Triton is imported")
    )
