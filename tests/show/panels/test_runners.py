"""The explorer of a saved call, of a notebook's own kernel, and of two runners."""

import types
from pathlib import Path

import pytest
import torch
from helpers.panels import SMALL

import attnlab
from attnlab.cli.demo import RIGHT, WRONG, plant
from attnlab.kernels.triton.interpreter import load_triton
from attnlab.show.panels import Panel, explorer


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a module with the right kernel of the demo; :func:`run_cell` defines it anew."""
    load_triton(interpret=True)
    path, _ = plant(tmp_path)
    path.write_text(path.read_text().replace(WRONG, RIGHT))
    module = types.ModuleType("notebook")
    module.path = path
    monkeypatch.setitem(__import__("sys").modules, "notebook", module)
    run_cell(module)
    return module


def run_cell(module: types.ModuleType, old: str = "", new: str = "") -> None:
    """Run the text of the kernel with an edit, as a cell of a notebook."""
    text = module.path.read_text().replace(old, new) if old else module.path.read_text()
    cell = module.path.with_name(f"cell_{len(text)}_{bool(old)}.py")
    cell.write_text(text)
    exec(compile(text, str(cell), "exec"), module.__dict__)


def test_a_kernel_of_a_cell_runs_again_when_the_cell_does(notebook: types.ModuleType) -> None:
    view = explorer(kernel=notebook.paged_attention)
    assert view.show().status == "match"
    right = bytes(view.pictures["error"].png)
    run_cell(notebook, RIGHT, WRONG)
    view.follow_cells()
    assert view.wait(60)
    assert view.result.status == "mismatch"
    assert view.pictures["error"].png != right
    again = view.result
    view.follow_cells()  # nothing is new
    assert view.wait(60)
    assert view.result is again


def test_two_runners_are_compared(notebook: types.ModuleType) -> None:
    run_cell(notebook, RIGHT, WRONG)
    view = explorer(kernel=notebook.paged_attention, against="model")
    assert view.show().status == "mismatch"
    assert view.data.other.result.status == "match"
    assert view.data.difference.mismatched > 0
    assert all(view.pictures[name].png for name in ("error", "other", "difference"))
    assert "differ beyond rounding" in view.texts["against"].value
    view.set(backend="model")
    assert view.wait(60)
    assert view.data.difference.mismatched == 0
    view._other.value = ""
    assert view.wait(60)
    assert view.data.other is None
    assert not view.pictures["difference"].png
    view._other.value = "no_such_file.py:f"
    assert view.wait(60)
    assert "no_such_file.py" in view.texts["against"].value


def test_a_saved_call_is_explored(notebook: types.ModuleType, tmp_path: Path) -> None:
    """Its own tensors run, on the models and on a kernel; a control changes them."""
    case = SMALL.replace(op="unified_attention", stage="sound", distribution="normal")
    call = attnlab.run(case).recorded_call
    call.save(tmp_path / "call.safetensors")
    view = explorer(tmp_path / "call.safetensors")
    assert view.show().status == "match"
    assert torch.equal(view.result.call.query, call.query)
    run_cell(notebook, RIGHT, WRONG)
    view = explorer(call, kernel=notebook.paged_attention, against="model")
    assert view.show().status == "mismatch"
    assert torch.equal(view.result.call.query, call.query)
    assert view.show(backend="model").status == "match"


def again(view: Panel, module: types.ModuleType, **names: object) -> Panel:
    """Run the cell that an explorer shows as code, in a notebook, and return its explorer."""
    before, _, last = view.case_text.texts["code"].value.rpartition("\n")
    return eval(last, module.__dict__ | names | _ran(before, module.__dict__ | names))  # type: ignore[no-any-return]


def _ran(text: str, names: dict[str, object]) -> dict[str, object]:
    exec(text, names)
    return names


def test_the_code_of_an_explorer_makes_it_again(notebook: types.ModuleType, tmp_path: Path) -> None:
    """With its kernels and its call, and what was changed."""
    view = explorer(kernel=notebook.paged_attention, against="model")
    view.set(num_heads=8)
    made = again(view, notebook)
    assert (made.case, made.against) == (view.case, "model")
    assert made._kernels.functions == view._kernels.functions
    call = attnlab.run(SMALL.replace(op="unified_attention", stage="sound")).recorded_call
    call.save(tmp_path / "call.safetensors")
    for what in (tmp_path / "call.safetensors", call):
        view = explorer(what, kernel=notebook.paged_attention)
        view.set(backend="model")
        made = again(view, notebook, call=call)
        assert made.show().status == "match"
        assert torch.equal(made.result.call.query, call.query)
        assert made.case == view.case
    view = explorer(SMALL, lab=attnlab.Lab(source=tmp_path))
    assert str(again(view, notebook)._lab.source) == str(tmp_path)
