"""Every OSError is one line and exit code 2; exit code 1 never comes from an error."""

import io
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import SMALL, error_line

RUN = (sys.executable, "-m", "attnlab")


def run(argv, **options):
    """Run a command in a process; return its exit code and its standard error."""
    done = subprocess.run([*RUN, *argv], stderr=subprocess.PIPE, text=True, timeout=120, **options)
    return done.returncode, done.stderr


def closed_pipe():
    """Return the write end of a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("argv", "end"),
    [
        (["explain"], "full"),
        (["explain", "--json"], "closed"),
        (["--help"], "full"),
        ([], "closed"),
    ],
)
def test_output_that_cannot_be_written(argv, end):
    writer = closed_pipe() if end == "closed" else os.open("/dev/full", os.O_WRONLY)
    try:
        code, error = run(argv, stdout=writer)
    finally:
        os.close(writer)
    assert (code, error.count("\n")) == (2, 1), error
    assert error.startswith("attnlab: ")


def test_a_closed_standard_output():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m attnlab explain >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


@pytest.mark.parametrize("cache", ["/proc", "/dev/null", "a file"])
def test_a_cache_that_cannot_be_used(capsys, monkeypatch, tmp_path, cache):
    if cache == "a file":
        (tmp_path / "file").write_text("")
        cache = str(tmp_path / "file")
    monkeypatch.setenv("ATTNLAB_CACHE", cache)
    error = error_line(capsys, ["fetch", "0.33.0"])
    assert error.startswith(f"attnlab: the cache folder {cache}"), error


def test_a_folder_as_input(capsys, tmp_path):
    for flags in (["diagnose", "--call"], ["diagnose", "--output-file"], ["explain", "--case"]):
        assert str(tmp_path) in error_line(capsys, [*flags, str(tmp_path)])


def test_standard_input_that_is_no_text(capsys, monkeypatch):
    for argv in (["explain", "--case", "-"], ["decode-error"]):
        text = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x80"), encoding="utf-8", errors="strict")
        monkeypatch.setattr("sys.stdin", text)
        error = error_line(capsys, argv)
        assert error.startswith("attnlab: standard input must be a readable text file")


def test_save_call_replaces_no_device(capsys, tmp_path):
    """As root a rename would replace the device node itself."""
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    for path in (link, Path("/dev/full")):
        assert "save-call must" in error_line(capsys, ["run", *SMALL, "--save-call", str(path)])
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
