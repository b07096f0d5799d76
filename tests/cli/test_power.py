"""attnlab power: counts, margins and remedies."""

from helpers.commands import SMALL, document, printed


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
