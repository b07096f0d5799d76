"""Copies of a call's tensors: the blocks of a large cache, and calls that are kept in CPU memory."""

import importlib
import sys

import pytest
import torch
from helpers.recorded import KERNEL, batch, write_module

from attnlab.recorder import capture as recording
from attnlab.recorder import snapshot
from attnlab.recorder.capture import Recorded
from attnlab.recorder.failing_side import Comparison
from attnlab.recorder.failure_report import report_failure
from attnlab.tensors.call_file import copy_blocks, named_by

LOST = "CUDA error: an illegal memory access was encountered\nCompile with …"


def large_fields():
    """Return fields with a cache of 9000 blocks; the table names one twice, and two that do not exist."""
    given = batch(num_blocks=9000)
    table = given["block_table"]
    table[1, 0], table[1, 3], table[0, 3] = table[0, 0].item(), -1, 9000
    scale = torch.rand(9000, 16, 2)
    names = {"q": "query", "k_cache": "key_cache", "v_cache": "value_cache"}
    return {names.get(name, name): one for name, one in given.items()} | {"k_scale": scale}


@pytest.mark.parametrize("most", [1 << 29, 0], ids=["every entry", "different blocks"])
def test_the_blocks_of_a_table(monkeypatch, most):
    """Both ways of copying give each named block once, as named_by and copy_blocks of the whole cache do."""
    monkeypatch.setattr(snapshot, "_MOST_REPEATED", most)
    fields = large_fields()
    held = snapshot.copy_fields(fields)
    assert len(held["key_cache"]) == (8 if most else 5)
    found = snapshot.each_block_once(held)
    ids = named_by(fields["block_table"], 9000)
    expected = copy_blocks((fields["key_cache"], fields["value_cache"]), ids)
    assert found["block_ids"].tolist() == ids.tolist()
    assert torch.equal(found["block_table"], expected.renumbered(fields["block_table"]))
    for name, cache in zip(("key_cache", "value_cache"), expected.caches, strict=True):
        assert torch.equal(found[name], cache)
        assert found[name].stride() == cache.stride()
    assert torch.equal(found["k_scale"], fields["k_scale"][ids])
    key, value = found["key_cache"], found["value_cache"]
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    again = snapshot.each_block_once(found)
    assert all(again[name] is one for name, one in found.items())


def test_changes_after_the_copy_reach_no_block():
    fields = large_fields()
    held = snapshot.copy_fields(fields)
    expected = fields["key_cache"][fields["block_table"][0, :3].long()].clone()
    table = fields["block_table"].clone()
    for one in fields.values():
        one.zero_()
    found = snapshot.each_block_once(held)
    assert torch.equal(found["key_cache"][found["block_table"][0, :3].long()], expected)
    assert found["block_ids"][found["block_table"][0, 0]] == table[0, 0]


@pytest.fixture
def op(tmp_path, monkeypatch):
    """The op ``paged`` in a module of its own."""
    write_module(tmp_path, "kernel_to_lose", KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("kernel_to_lose")
    sys.modules.pop("kernel_to_lose", None)


def broken_after(monkeypatch, text=LOST):
    """Let the copy of the output after the call fail as it does when a kernel broke the GPU's context."""
    copied, after = recording.copied, recording.Capture._after

    def lost(self, *args):
        def fails(tensor):
            raise RuntimeError(text)

        monkeypatch.setattr(recording, "copied", fails)
        after(self, *args)
        monkeypatch.setattr(recording, "copied", copied)

    monkeypatch.setattr(recording.Capture, "_after", lost)


def test_a_call_on_the_host_survives_a_lost_context(op, monkeypatch):
    """The op returns before its kernel fails; the call is kept with its inputs as rejected."""
    broken_after(monkeypatch)
    capture = recording.Capture(ops=("kernel_to_lose:paged",), host=True)
    capture.start()
    op.paged(**batch())
    capture.stop()
    (call,) = capture.calls
    assert call.rejection.startswith("RuntimeError: CUDA error: an illegal memory access")
    assert torch.equal(call.query, batch()["q"])


def test_another_error_while_copying_is_logged(op, monkeypatch, caplog):
    """The op is not blamed for it."""
    broken_after(monkeypatch, "CUDA out of memory")
    capture = recording.Capture(ops=("kernel_to_lose:paged",))
    capture.start()
    op.paged(**batch())
    capture.stop()
    assert len(capture.calls) == 0
    assert "out of memory" in caplog.text


def test_the_report_of_tensors_that_are_lost(op, tmp_path, monkeypatch):
    """It states the op, the error and what to do, although no tensor can be read."""
    capture = recording.Capture(ops=("kernel_to_lose:paged",))
    capture.start()
    op.paged(**batch())
    capture.stop()

    def lost(self):
        raise RuntimeError(LOST)

    monkeypatch.setattr(Recorded, "call", property(lost))
    one = torch.zeros(6, 4, 64)
    comparison = Comparison(actual=one, expected=one, atol=0.0, rtol=0.0, passed=False)
    report = report_failure("t.py::t", list(capture.calls.recorded), [comparison], tmp_path / "out")
    facts = dict(report.properties())
    assert facts["attnlab_op"].startswith("kernel_to_lose.paged")
    assert facts["attnlab_diagnosis"] == f"none: {LOST.splitlines()[0]}"
    assert "--attnlab-host" in facts["attnlab_advice"]
    assert not (tmp_path / "out").exists()
