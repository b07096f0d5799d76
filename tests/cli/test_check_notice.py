"""attnlab check: the notice for a release that differs from the rules that are used for it."""

from types import SimpleNamespace

import pytest

from attnlab.case.errors import AttnLabError
from attnlab.cli.main import main
from attnlab.kernels.model import ModelBackend


@pytest.mark.parametrize(("version", "differs"), [("0.29.0", True), ("0.33.0", False)])
def test_a_release_between_the_rules_is_stated(tmp_path, capsys, monkeypatch, version, differs):
    def stop(**options):
        raise AttnLabError("nothing is checked here")

    source = SimpleNamespace(version=version, rules="0.33.0")
    monkeypatch.setattr("attnlab.kernels.vllm.source.find_source", lambda *given: source)
    backend = ModelBackend(rules="0.33.0")
    monkeypatch.setattr("attnlab.checker.check.backend_of", lambda **options: backend)
    monkeypatch.setattr("attnlab.checker.check.check", stop)
    assert main(["check", "--source", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    notices = [line for line in lines if f"vLLM {version} is run with the rules of 0.33.0" in line]
    assert len(notices) == differs
