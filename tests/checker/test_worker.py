"""A case that hangs or ends its process is a finding; the cases before and after it count."""

import time

from helpers.plugins import RIGHT, checked_by_workers, planted

PLACE = "    key_cache, value_cache = to_flash"
EXIT = "ctypes.CDLL(None)._exit(3)"  # cannot be caught


def with_fault(folder, line, when="call.sliding_window"):
    """Return the example kernel with a line that runs for some calls."""
    assert PLACE in RIGHT
    fault = f"    if {when}:\n        import ctypes, time\n        {line}\n{PLACE}"
    return planted(folder, RIGHT.replace(PLACE, fault))


def test_a_kernel_that_loops_is_a_finding(tmp_path):
    report = checked_by_workers(with_fault(tmp_path, "time.sleep(1000)"), limit_s=3.0)
    assert [(one.kind, one.diagnosis) for one in report.findings] == [("fails", "does not end")]
    assert report.findings[0].case.sliding_window
    assert "3 s" in report.findings[0].evidence
    assert report.cases_run >= 5


def test_a_kernel_that_ends_its_process_is_a_finding(tmp_path):
    """The finding has the case that did it, and the other cases run."""
    report = checked_by_workers(with_fault(tmp_path, EXIT))
    assert [(one.kind, one.diagnosis) for one in report.findings] == [("fails", "crash")]
    assert report.findings[0].case.sliding_window
    assert "exit code 3" in report.findings[0].evidence
    assert report.cases_run >= 5


def test_the_time_limit_holds_for_a_kernel_that_always_loops(tmp_path):
    begin = time.monotonic()
    report = checked_by_workers(
        with_fault(tmp_path, "time.sleep(1000)", "True"), limit_s=2.0, seconds=2.0
    )
    assert [one.diagnosis for one in report.findings] == ["does not end"]
    assert [entry.reason for entry in report.not_run] == ["the time was up"]
    assert time.monotonic() - begin < 90
