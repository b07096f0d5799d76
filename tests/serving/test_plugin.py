"""The entry point: idle without the variable, harmless with a wrong one, and loaded twice."""

import importlib.metadata
import logging
import subprocess
import sys

import pytest

from attnlab.serving import plugin, start


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


@pytest.mark.parametrize("text", ["{", "/no/such/file", '{"out": "x", "sample": 7}'])
def test_wrong_settings_stop_nothing(monkeypatch, caplog, text):
    monkeypatch.setenv(plugin.VARIABLE, text)
    with caplog.at_level(logging.WARNING, logger="attnlab.serving"):
        plugin.activate()
    assert len(caplog.records) == 1
    assert start._started == []


def test_twice_is_once(tmp_path):
    """In a process of its own, because the hooks stay."""
    code = (
        "from attnlab.serving import start\n"
        "import sys, types\n"
        "runner = types.ModuleType('vllm.v1.worker.gpu_model_runner')\n"
        "class GPUModelRunner:\n"
        "    def execute_model(self, scheduled): return scheduled\n"
        "    def _build_attention_metadata(self): return 'metadata'\n"
        "runner.GPUModelRunner = GPUModelRunner; sys.modules[runner.__name__] = runner\n"
        f'text = \'{{"out": "{tmp_path}"}}\'\n'
        "one = start.start(text); hooked = GPUModelRunner.execute_model\n"
        "assert start.start(text) is one\n"
        "assert GPUModelRunner.execute_model is hooked\n"
        "assert hooked.__wrapped__.__name__ == 'execute_model'\n"
        "assert not hasattr(hooked.__wrapped__, '__wrapped__')\n"
        "found = GPUModelRunner()\n"
        "assert found.execute_model(3) == 3\n"
        "assert found._build_attention_metadata() == 'metadata'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
