"""A JupyterLab server for the tests of panels."""

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0


@contextmanager
def running_lab(folder: Path, log: Path) -> Iterator[str]:
    """Run JupyterLab in ``folder``, with new settings; yield its URL, with {} for the notebook."""
    port, token = _free_port(), secrets.token_hex(16)
    address = f"http://127.0.0.1:{port}"
    home = log.parent / "jupyter"
    folders = {
        f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")
    }
    labs = {
        f"JUPYTERLAB_{name}_DIR": str(home / name.lower()) for name in ("SETTINGS", "WORKSPACES")
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--ip=127.0.0.1", f"--IdentityProvider.token={token}", f"--notebook-dir={folder}"]
    command += ["--expose-app-in-browser", "--ServerApp.port_retries=0"]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **folders, **labs}
        )
        try:
            _wait_for(f"{address}/api?token={token}", server, log)
            yield f"{address}/lab/tree/{{}}?token={token}&reset"
        finally:
            server.terminate()
            try:
                server.wait(timeout=15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server responds; raise RuntimeError with the end of its log if it does not."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start: {log.read_text()[-2000:]}")
