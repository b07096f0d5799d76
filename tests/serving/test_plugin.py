"""The entry point: idle without the variable, harmless with a wrong one, and loaded twice."""

import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.processes import in_copy

from attnlab.case.errors import InvalidCase
from attnlab.recorder.ops import vllm_ops
from attnlab.serving import plugin, start
from attnlab.serving.plugin import CaptureSettings, run_command


def test_it_is_an_entry_point_of_vllm():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    values = {point.name: point.value for point in points}
    if "attnlab" not in values:
        pytest.skip("attnlab was installed before it had this entry point")
    assert values["attnlab"] == "attnlab.serving.plugin:activate"


def test_without_the_variable_nothing_is_imported(monkeypatch):
    code = (
        "import os, sys; os.environ.pop('ATTNLAB_CAPTURE', None)\n"
        "from attnlab.serving.plugin import activate\n"
        "activate(); activate()\n"
        "assert not {'torch', 'numpy', 'attnlab.serving.start'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


IDLE = """
import json, os, sys, types

os.environ.pop("ATTNLAB_CAPTURE", None)
for name, attributes in names.items():
    module = sys.modules[name] = types.ModuleType(name)
    for attribute in attributes:
        text = f"class {attribute}:\\n    def execute_model(self): ...\\n"
        exec(text if attribute[0].isupper() else f"def {attribute}(slot_mapping): ...", vars(module))

def objects():
    found = {}
    for name in names:
        for attribute, value in vars(sys.modules[name]).items():
            found[name, attribute] = value
            if isinstance(value, type):
                found |= {(name, attribute, own): one for own, one in vars(value).items()}
    return found, list(sys.meta_path)

def changed(before):
    after = objects()
    replaced = [key for key, value in before[0].items() if after[0][key] is not value]
    return len(replaced) + len(after[0]) - len(before[0]) + (after[1] != before[1])

from attnlab.serving.plugin import activate
before = objects()
activate(); activate()
idle = changed(before)
os.environ["ATTNLAB_CAPTURE"] = json.dumps({"out": folder})
activate()
print(json.dumps([idle, changed(before)]))
"""


def printed_by(code: str, folder: Path, **names: object) -> str:
    """Run code with some names in a copy of this process, because hooks stay; return what it prints."""
    ended, text = in_copy(lambda: exec(code, {"folder": str(folder), **names}) or 0, folder)
    assert ended == 0, text
    return text


def test_without_the_variable_nothing_is_replaced(tmp_path):
    """No function, class, method or import hook: a step runs the same code. With it, many are."""
    ops = [op.name for op in vllm_ops() if not op.writes_cache]
    names = start.hooked_names(ops)
    idle, active = json.loads(printed_by(IDLE, tmp_path, names=names))
    assert idle == 0
    assert (
        active >= sum(map(len, names.values())) - 4
    )  # three classes are hooked inside, two have no step


@pytest.mark.parametrize("text", ["{", "/no/such/file", '{"out": "x", "sample": 7}'])
def test_wrong_settings_stop_nothing(monkeypatch, caplog, text):
    monkeypatch.setenv(plugin.VARIABLE, text)
    with caplog.at_level(logging.WARNING, logger="attnlab.serving"):
        plugin.activate()
    assert len(caplog.records) == 1
    assert start._started == []


def test_twice_is_once(tmp_path):
    code = (
        "from attnlab.serving import start\n"
        "import sys, types\n"
        "runner = types.ModuleType('vllm.v1.worker.gpu_model_runner')\n"
        "class GPUModelRunner:\n"
        "    def execute_model(self, scheduled): return scheduled\n"
        "    def _build_attention_metadata(self): return 'metadata'\n"
        "runner.GPUModelRunner = GPUModelRunner; sys.modules[runner.__name__] = runner\n"
        "text = '{\"out\": \"' + folder + '\"}'\n"
        "one = start.start(text); hooked = GPUModelRunner.execute_model\n"
        "assert start.start(text) is one\n"
        "assert GPUModelRunner.execute_model is hooked\n"
        "assert hooked.__wrapped__.__name__ == 'execute_model'\n"
        "assert not hasattr(hooked.__wrapped__, '__wrapped__')\n"
        "found = GPUModelRunner()\n"
        "assert found.execute_model(3) == 3\n"
        "assert found._build_attention_metadata() == 'metadata'\n"
    )
    printed_by(code, tmp_path)


# The command: its environment, its exit code, and signals.


def run(folder, code: str, to_stderr: bool = True) -> int:
    return run_command(
        [sys.executable, "-c", code], CaptureSettings(out=str(folder)), to_stderr=to_stderr
    )


def test_the_exit_code_is_the_commands(tmp_path):
    assert run(tmp_path, "raise SystemExit(7)") == 7
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)") == 128 + 9


def test_the_environment_activates_the_plug_in(tmp_path, monkeypatch):
    code = (
        "import os; from attnlab.serving.plugin import CaptureSettings as S\n"
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
        "from attnlab.serving.plugin import CaptureSettings\n"
        "import sys\n"
        f"settings = CaptureSettings(out={str(tmp_path)!r})\n"
        f"sys.exit(run_command([sys.executable, '-c', {child!r}], settings, to_stderr=False))"
    )
    one = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
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
