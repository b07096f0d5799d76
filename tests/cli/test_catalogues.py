"""The commands that list the lab's catalogues, the environment, and shell completion."""

import shutil
import subprocess

import pytest
from helpers.commands import SMALL, document, error_line, one_parser, printed

from attnlab import __version__
from attnlab.case.case import Case
from attnlab.case.platforms import PLATFORMS, STAGES
from attnlab.cli import main as command_line
from attnlab.cli.main import COMMANDS, main
from attnlab.contracts.dispatch import decide
from attnlab.defects import DEFECTS
from attnlab.reports import investigate
from study import claims

CATALOGUES = {"stages": STAGES, "platforms": PLATFORMS, "defects": DEFECTS}


@pytest.mark.parametrize("command", CATALOGUES)
def test_every_entry_is_listed_and_explained(capsys, monkeypatch, command):
    monkeypatch.setattr(command_line, "make_parser", one_parser)
    everything = document(capsys, [command], 0)
    assert list(everything) == list(CATALOGUES[command])
    text = printed(capsys, [command], 0)
    assert all(name in text for name in everything if len(name) < 16)  # longer ones may be folded
    for name, facts in everything.items():
        assert document(capsys, [command, name], 0) == facts
        text = printed(capsys, [command, name], 0)
        assert text.startswith(f"{command[:-1].capitalize()} {name} ")


def test_the_facts_are_those_of_the_catalogue(capsys):
    assert document(capsys, ["platforms", "gfx942"], 0)["format_of_fp8"] == "fp8_e4m3fnuz"
    assert document(capsys, ["stages", "fill_decode"], 0)["fill"] == "decode_rows"
    defect = document(capsys, ["defects", "kv_head_modulo"], 0)
    assert defect["what_happens"] == DEFECTS["kv_head_modulo"].text


def test_the_environment(capsys):
    found = document(capsys, ["env"], 0)
    assert found["attnlab"] == __version__
    names = {"python", "torch", "triton", "numpy", "vllm", "gpu", "compiler", "cores"}
    assert names | {"memory_gib", "cache_folder"} <= set(found)
    assert all(found.values())
    assert __version__ in printed(capsys, ["env"], 0)


def test_the_environment_names_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "new"))
    found = document(capsys, ["env"], 0)
    assert "no-such-compiler" in found["compiler"]
    assert found["cache_folder"].endswith("(not created yet)")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_completion_knows_every_command(capsys, tmp_path, shell):
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", shell])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(command.name in text for command in COMMANDS)
    assert "sliding-window" in text
    if shutil.which(shell):
        script = tmp_path / "completion"
        script.write_text(text)
        assert subprocess.run([shell, "-n", script], check=False).returncode == 0


# attnlab explain: the kernels and the conditions.


ARGV = ["explain", "--platform", "gfx1100", "--num-queries-per-kv", "4"]


def test_the_text_has_each_term_and_reason(capsys):
    text = printed(capsys, ARGV, 0)
    decision = decide(Case(platform="gfx1100", num_queries_per_kv=4))
    assert {"block_size"} <= {term.name for term in decision.refused}
    for words in (*decision.kernels, *decision.reasons, *(term.name for term in decision.terms)):
        assert words in text


def test_the_document_has_the_terms(capsys):
    found = document(capsys, ARGV, 0)
    assert found["decode"] == "kernel_paged_attention_2d"
    assert [term["name"] for term in found["terms"] if not term["holds"]] == ["block_size"]


# attnlab claims: one row for each claim.


def test_claims(capsys, monkeypatch):
    monkeypatch.setattr(claims, "LEDGER", claims.LEDGER[8:10])
    found = document(capsys, ["claims"], 0)
    assert [(one["number"], one["verdict"]) for one in found] == [("C9", "holds"), ("C10", "holds")]
    text = printed(capsys, ["claims"], 0)
    for one in found:
        assert f"{one['number']} {one['verdict']}" in text


def test_an_installation_without_notebooks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(investigate, "NOTEBOOKS", tmp_path)
    assert "run attnlab from a checkout" in error_line(capsys, ["claims"])


# attnlab power: counts, margins and remedies.


def test_survivors_have_remedies_and_the_text_has_every_mutant(capsys):
    argv = ["power", *SMALL, "--stage", "cast_after_cumsum", "--atol", "1e-4"]
    found = document(capsys, argv, 1)
    assert found["counts"]["survived"] > 5
    by_name = {mutant["name"]: mutant for mutant in found["mutants"]}
    assert by_name["scale_doubled"]["remedy"]["distribution"] == "normal"
    assert found["models_pass"] is True
    assert len(by_name) > 10
    text = printed(capsys, argv, 1)
    assert all(f"{name} {mutant['outcome']}" in text for name, mutant in by_name.items())
