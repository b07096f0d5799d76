"""A new notebook: its experiments run, and a kernel that is repaired afterwards fails its verdicts."""

import json

import nbformat
import pytest
from helpers.commands import error_line
from helpers.plugins import RIGHT
from helpers.saved_calls import WRONG, call_of, kernel_file

from attnlab.cli.main import main


@pytest.fixture
def notebook(tmp_path, capsys):
    """Return a notebook of the saved call of a wrong kernel, and the file of that kernel."""
    kernel, call = kernel_file(tmp_path, WRONG, "mine"), tmp_path / "call.safetensors"
    call_of(query_lens=(3,), ctx_lens=(14,), num_heads=2).save(call)
    words = ["new-investigation", "Why?", "--from", str(call), "--kernel", kernel]
    assert main([*words, "--notebooks-folder", str(tmp_path), "--json"]) == 0
    return tmp_path / "01-why.ipynb", tmp_path / "mine.py", json.loads(capsys.readouterr().out)


def test_the_cells_find_again_what_was_found(notebook, tmp_path):
    path, kernel, printed = notebook
    assert printed["notebook"] == str(path)
    cells = nbformat.read(path, as_version=4).cells
    nbformat.validate(nbformat.read(path, as_version=4))
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    code = code.replace("attnlab.plot(result);", "").replace("attnlab.plot(xray);", "")
    exec(compile(code, "notebook", "exec"), {})
    kernel.write_text(RIGHT)
    with pytest.raises(AssertionError) as failed:
        exec(compile(code, "notebook", "exec"), {})
    assert "the output" in str(failed.value)


def test_a_right_kernel_is_no_start(tmp_path, capsys):
    right = kernel_file(tmp_path, RIGHT, "right")
    words = ["new-investigation", "Why?", "--from", right, "--notebooks-folder", str(tmp_path)]
    assert "must be wrong in a random case" in error_line(capsys, words)
