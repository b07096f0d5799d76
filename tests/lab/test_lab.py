"""`make lab` serves the notebooks, and only with the token."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def lab_command() -> list[str]:
    """Return the arguments of the command that `make lab` runs after the set-up."""
    done = subprocess.run(
        ["make", "--dry-run", "--assume-old=setup", "lab"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if "/jupyter lab" in line)
    program, *words = shlex.split(line)
    assert program.endswith("/jupyter")
    return words


def status_of(url: str, limit_s: float = 60.0) -> int:
    """Return the HTTP status of a GET; retry, because the server prints its address before it listens."""
    end = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=limit_s) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except urllib.error.URLError:
            assert time.monotonic() < end, f"no answer at {url}"
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_the_lab_asks_for_its_token(tmp_path: Path) -> None:
    """The server refuses requests without the token and serves those with it."""
    command = lab_command()
    assert not any(word in " ".join(command) for word in ("token", "password", "--ip", "allow"))
    assert (ROOT / command[-1]).exists()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = ("--no-browser", f"--port={port}", "--allow-root")
    with subprocess.Popen(
        [sys.executable, "-m", "jupyter", *command, *quiet],
        cwd=ROOT,
        env={**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path), "HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stderr is not None
            address = re.compile(r"(http://127[^\s?]*/)lab[^\s?]*(?:\?token=(\w+))?\s*$")
            found = next(one for line in server.stderr if (one := address.search(line)))
            assert found[2], "the server asks for no token"
            contents = f"{found[1]}api/contents"
            assert status_of(contents) == 403
            assert status_of(f"{contents}?token=guessed") == 403
            assert status_of(f"{contents}?token={found[2]}") == 200
            assert status_of(f"{contents}/01-int64-tables.ipynb?token={found[2]}") == 200
        finally:
            server.terminate()
            server.communicate(timeout=30)
