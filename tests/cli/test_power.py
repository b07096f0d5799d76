"""attnlab power: counts, margins and remedies."""

from helpers.commands import SMALL, document, printed


def test_survivors_have_remedies(capsys):
    found = document(capsys, ["power", *SMALL, "--stage", "cast_after_cumsum", "--atol", "1e-4"], 1)
    assert found["counts"]["survived"] > 5
    by_name = {mutant["name"]: mutant for mutant in found["mutants"]}
    assert by_name["scale_doubled"]["remedy"]["distribution"] == "normal"
    assert found["models_pass"] is True


def test_the_text_has_every_mutant(capsys):
    mutants = document(capsys, ["power", *SMALL], 1)["mutants"]
    text = printed(capsys, ["power", *SMALL], 1)
    assert len(mutants) > 10
    assert all(f"{mutant['name']} {mutant['outcome']}" in text for mutant in mutants)
