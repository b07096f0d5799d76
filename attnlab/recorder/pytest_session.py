"""The part of the pytest plugin that records: it is imported only if an option asks for it.

Under pytest-xdist, the workers record, diagnose and write; the controller only collects what the tests'
reports carry.
"""

import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.recorder.capture import Capture
from attnlab.recorder.comparisons import Comparisons
from attnlab.recorder.failure_report import FailureReport, report_failure
from attnlab.recorder.power_of_tests import TestPower, powers_of, table, write_powers
from attnlab.tensors.origin import Origin

_log = logging.getLogger("attnlab.recorder")
_POWER = "attnlab_power"  # the property that carries a test's power


class Session:
    """Records the calls and comparisons of each test, and reports on it. An error inside is logged once,
    and the test run continues as without attnlab."""

    def __init__(self, config: pytest.Config) -> None:
        self._reports = bool(config.getoption("attnlab"))
        self._json = config.getoption("attnlab_power_json")
        self._scores = bool(config.getoption("attnlab_power") or self._json)
        self._folder = Path(config.getoption("attnlab_dir")).absolute()
        self._powers: list[TestPower] = []
        self._is_controller = bool(getattr(config.option, "numprocesses", None)) and not hasattr(
            config, "workerinput"
        )
        keep = config.getoption("attnlab_keep")
        host = bool(config.getoption("attnlab_host"))
        self._capture = Capture(keep=keep, ops=config.getini("attnlab_ops"), host=host)
        self._comparisons = Comparisons(
            keep=keep, sizes=self._sizes, on_error=self._failed, host=host
        )
        self._logged = False

    @classmethod
    def start(cls, config: pytest.Config) -> None:
        """Register a session and start to record. Raises pytest.UsageError for a wrong option."""
        try:
            session = cls(config)
        except InvalidCase as error:
            raise pytest.UsageError(f"attnlab: {error}") from error
        config.pluginmanager.register(session, "attnlab-session")
        if not session._is_controller:
            session._capture.start()
            session._comparisons.start()

    def pytest_unconfigure(self) -> None:
        """Put the wrapped functions back."""
        if not self._is_controller:
            self._comparisons.stop()
            self._capture.stop()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Forget the calls of the previous test."""
        self._capture.calls.clear()
        self._comparisons.last.clear()
        self._capture.origin = Origin(test_id=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the section and the properties to the report of a test."""
        report = yield
        is_reported = self._reports and report.failed and self._capture.calls.recorded
        is_scored = self._scores and report.passed and report.when == "call"
        if not is_reported and not is_scored:
            return report
        try:
            # The test may have set another default device.
            with torch.device("cpu"), self._comparisons.paused():
                if is_reported:
                    self._add_section(item, report)
                else:
                    self._add_powers(item, report)
        except Exception as error:
            self._failed(item.nodeid, error)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the power of the tests, those of other processes, too."""
        if report.when == "call":
            self._powers += [
                TestPower.of_json(str(value))
                for name, value in report.user_properties
                if name == _POWER
            ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table of powers, and write it."""
        if not self._scores:
            return
        terminalreporter.section("attnlab power")
        for line in table(self._powers):
            terminalreporter.line(line)
        if self._json is None:
            return
        try:
            write_powers(Path(self._json), self._powers)
        except AttnLabError as error:
            terminalreporter.line(f"attnlab: {error}")

    def _add_section(self, item: pytest.Item, report: pytest.TestReport) -> None:
        calls = self._capture.calls
        found: FailureReport = report_failure(
            item.nodeid, list(calls.recorded), list(self._comparisons.last), self._folder
        )
        report.sections.append(("attnlab", "\n".join(found.lines())))
        self._add_properties(item, report, found.properties())

    def _add_powers(self, item: pytest.Item, report: pytest.TestReport) -> None:
        powers = powers_of(item.nodeid, list(self._capture.calls.recorded), self._comparisons.last)
        self._add_properties(item, report, [(_POWER, one.to_json()) for one in powers])

    @staticmethod
    def _add_properties(
        item: pytest.Item, report: pytest.TestReport, properties: list[tuple[str, str]]
    ) -> None:
        """Add properties to this report, and to the last one of the test, which the JUnit file takes."""
        report.user_properties.extend(properties)
        item.user_properties.extend(properties)

    def _sizes(self) -> set[int]:
        """Return the numbers of elements of the recorded outputs."""
        recorded = self._capture.calls.recorded
        return {output.numel() for one in recorded for output in one.outputs}

    def _failed(self, what: str, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            text = " ".join(str(error).split())
            _log.warning("attnlab failed in %s: %s: %s", what, type(error).__name__, text)
