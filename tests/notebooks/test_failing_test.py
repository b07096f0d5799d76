"""The example of a failing test as notebook 09 uses it."""

import subprocess

import pytest
from helpers.saved_calls import call_of
from helpers.sources import needs_triton

from attnlab.case.errors import Unavailable
from study import failing_test
from study.failing_test import call_errors, run_failing_test

PRINTED = """F.
E       AssertionError
----------------------------------- attnlab ------------------------------------
op          windowed_attention.paged_attention, call 1 of the last 1
wrong side  the kernel
evidence    the output is off by up to 1.71 in 15 rows; the expected value is within 0.000487 of the
            exact result
=========================== short test summary info ============================
1 failed, 1 passed in 1.00s
"""


def test_the_report_is_read(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "call.safetensors").touch()
    done = subprocess.CompletedProcess([], 1, stdout=PRINTED, stderr="")
    monkeypatch.setattr(failing_test.subprocess, "run", lambda *args, **kwargs: done)
    failed = run_failing_test(tmp_path)
    assert failed.summary == "1 failed, 1 passed in 1.00s"
    assert failed.facts["wrong side"] == "the kernel"
    assert failed.facts["evidence"].endswith("of the exact result")
    assert failed.call == tmp_path / "a" / "call.safetensors"
    done.stdout = "no tests ran"
    with pytest.raises(Unavailable, match="no tests ran"):
        run_failing_test(tmp_path)


def test_an_installation_without_the_example(tmp_path, monkeypatch):
    monkeypatch.setattr(failing_test, "_FOLDER", tmp_path / "none")
    with pytest.raises(Unavailable, match="checkout"):
        run_failing_test(tmp_path)


def test_errors_of_a_call():
    call = call_of()
    assert call_errors(call).mismatched == 0
    call.output[5, 2] += 1
    errors = call_errors(call)
    assert (errors.mismatched, errors.first_index) == (32, (5, 2, 0))


@needs_triton
def test_the_repaired_kernel_matches(tmp_path):
    import attnlab

    call = call_of(sliding_window=8)
    names = [failing_test.example_kernel(tmp_path, repaired=fixed) for fixed in (False, True)]
    found = attnlab.replay_call(call, backends=names)
    assert [one.status for one in found.replays] == ["mismatch", "match"]
