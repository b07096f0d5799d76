"""attnlab decode-error: the place of an assertion's largest difference."""

import io

import pytest
from helpers.commands import SEED_ID, document, error_line, printed

TEXT = (
    "Mismatched elements: 8192 / 43720704 (0.0%)\n"
    "Greatest absolute difference: 1.685546875 at index (5336, 0, 0) (up to 0.0001 allowed)"
)


def test_the_recorded_failure(capsys, monkeypatch, tmp_path):
    """Sequence 9, its only token, all heads; the error is too large for a wrong average."""
    file = tmp_path / "assertion.txt"
    file.write_text(TEXT)
    decoded = document(capsys, ["decode-error", str(file), "--test-id", SEED_ID], 0)
    assert (decoded["seq"], decoded["token"], decoded["query_len"]) == (9, 0, 1)
    assert decoded["rows_worth"] == 1.0
    assert decoded["newest"] == [929, 29, 1]
    assert decoded["max_abs_error"] > decoded["largest_possible"]
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    text = printed(capsys, ["decode-error", "--test-id", SEED_ID], 0)
    assert len(decoded["sentences"]) > 2
    assert all(" ".join(words.split()) in text for words in decoded["sentences"])


@pytest.mark.parametrize(
    "text",
    [
        "all fine",
        "Mismatched elements: 1 / 10 (10%)\nGreatest absolute difference: 1 at index (0, 0, 0)",
        "Mismatched elements: 1 / 43720704 (0%)\n"
        "Greatest absolute difference: 1 at index (9999, 0, 0)",
    ],
    ids=["no counts", "another size", "index outside"],
)
def test_a_text_that_does_not_fit_is_refused(capsys, monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert error_line(capsys, ["decode-error"]).startswith("attnlab: text ")
