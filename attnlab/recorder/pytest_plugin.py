"""The pytest plugin: its options. Everything else is imported when one of them is given.

This module is imported at every start of pytest, so it imports neither torch nor the rest of attnlab.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Add --attnlab and the options that belong to it."""
    group = parser.getgroup("attnlab", "attention tests (attnlab)")
    group.addoption(
        "--attnlab",
        action="store_true",
        help="record the attention calls of each test; diagnose them if it fails",
    )
    group.addoption(
        "--attnlab-keep",
        type=int,
        default=4,
        metavar="N",
        help="how many of a test's last calls are kept (default: 4)",
    )
    group.addoption(
        "--attnlab-host",
        action="store_true",
        help="copy calls to CPU memory: slower, but they survive an illegal memory access on the GPU",
    )
    group.addoption(
        "--attnlab-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds of processor time for further runs of the kernel of a failing test, six times as many "
        "for all tests; 0 for none (default: 30)",
    )
    group.addoption(
        "--attnlab-dir",
        default="attnlab-failures",
        metavar="DIR",
        help="where the calls and pages of failing tests are written (default: attnlab-failures)",
    )
    group.addoption(
        "--attnlab-power",
        action="store_true",
        help="list, for each passing test, the defects that its comparison would not notice",
    )
    group.addoption(
        "--attnlab-power-json", metavar="FILE", help="write the list of --attnlab-power as JSON"
    )
    parser.addini(
        "attnlab_ops",
        "further ops whose calls are recorded, MODULE:FUNCTION; arguments are found by their names",
        type="linelist",
        default=[],
    )


def pytest_configure(config: "pytest.Config") -> None:
    """Start recording if an option asks for it."""
    options = ("attnlab", "attnlab_power", "attnlab_power_json")
    if any(config.getoption(name) for name in options):
        from attnlab.recorder.pytest_session import Session

        Session.start(config)
