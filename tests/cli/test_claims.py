"""attnlab claims: one row for each claim."""

from helpers.commands import document, error_line, printed

from attnlab.reports import investigate
from study import claims


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
