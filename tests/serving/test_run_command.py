"""The command: its environment, its exit code, and signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from attnlab.case.errors import InvalidCase
from attnlab.serving.plugin import run_command
from attnlab.serving.settings import CaptureSettings


def run(folder, code: str, to_stderr: bool = True) -> int:
    return run_command(
        [sys.executable, "-c", code], CaptureSettings(out=str(folder)), to_stderr=to_stderr
    )


def test_the_exit_code_is_the_commands(tmp_path):
    assert run(tmp_path, "raise SystemExit(7)") == 7
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)") == 128 + 9


def test_the_environment_activates_the_plug_in(tmp_path, monkeypatch):
    code = (
        "import os; from attnlab.serving.settings import CaptureSettings as S\n"
        "S.of_text(os.environ['ATTNLAB_CAPTURE']); print(os.environ.get('VLLM_PLUGINS'))"
        f"; open({str(tmp_path / 'seen')!r}, 'w').write(str(os.environ.get('VLLM_PLUGINS')))"
    )
    for given, seen in ((None, "None"), ("other", "other,attnlab"), ("attnlab", "attnlab")):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if given is not None:
            monkeypatch.setenv("VLLM_PLUGINS", given)
        assert run(tmp_path, code) == 0
        assert (tmp_path / "seen").read_text() == seen


@pytest.mark.parametrize(("command", "code"), [("pass", 0), ("import sys; sys.exit(143)", 0)])
def test_an_end_by_a_signal_that_was_passed_on_is_regular(tmp_path, command, code):
    """The command ends by the signal, or with the exit code that stands for it."""
    handler = f"signal.signal(15, lambda *a: exec({command!r}))" if command != "pass" else ""
    child = f"import signal, time\n{handler}\nprint('ready', flush=True); time.sleep(60)"
    script = (
        "from attnlab.serving.plugin import run_command\n"
        "from attnlab.serving.settings import CaptureSettings\n"
        "import sys\n"
        f"settings = CaptureSettings(out={str(tmp_path)!r})\n"
        f"sys.exit(run_command([sys.executable, '-c', {child!r}], settings, to_stderr=False))"
    )
    one = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert one.stdout is not None
    assert one.stdout.readline() == "ready\n"
    time.sleep(0.05)
    os.kill(one.pid, signal.SIGTERM)
    assert one.wait(30) == code
    one.stdout.close()


def test_bad_input(tmp_path):
    settings = CaptureSettings(out=str(tmp_path))
    with pytest.raises(InvalidCase, match="must be a command"):
        run_command(["/no/such/command"], settings, to_stderr=True)
    (tmp_path / "x.record.jsonl").write_text("")
    with pytest.raises(InvalidCase, match="out must be"):
        run_command([sys.executable], settings, to_stderr=True)
