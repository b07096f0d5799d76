"""The process of the engine ``ray`` that talks to Ray: it starts, uses and ends actors as it is asked to.

Requests are tuples: (JOB, pickled job), (START, number), (RUN, number, task), (KILL, number) and (CLOSE,).
Messages are (REACHED, None), then (CONNECTED, (address, slots)) or (FAILED, text). After that they begin with
the number of an actor: (number, READY, (node, free bytes)), (number, DONE, (outcome or error, free bytes))
and (number, LOST, (text, whether memory was the cause)).
"""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attnlab.case.machine import cores

JOB, START, RUN, KILL, CLOSE = "job", "start", "run", "kill", "close"
REACHED, CONNECTED, FAILED = "reached", "connected", "failed"
READY, DONE, LOST = "ready", "done", "lost"

_PROBE_S = 4.0  # to connect, and again to get an answer
_SETTINGS = b"\x04"  # the type of HTTP/2's first frame
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + bytes(5)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_WATCH_S = 0.2
_CLOSE_LIMIT_S = 5.0
_STARTS = 3  # on a busy machine, Ray's own limit of 30 s is too short at times
_OBJECTS_BYTES = 80 << 20  # Ray's object store; nothing large is put there
_MEMORY = re.compile(r"low on memory|OutOfMemory|out of memory", re.IGNORECASE)
_CAUSE = re.compile(r"^(\w+\.)*\w+(Error|Exception): |because")


def serve(connection: Connection, address: str | None, device: str, folder: str | None) -> None:
    """Connect to the cluster at an address, or start a local one, and follow requests until CLOSE.

    ``folder``: of a local cluster's files and sockets, None for Ray's default.
    """
    _set_apart()
    threading.Thread(target=_watch, args=(os.getppid(), address, folder), daemon=True).start()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_NUM_REDIS_GET_RETRIES"] = "5"  # seconds until it states why it cannot connect
    if address is None:
        # Without a token in the environment, Ray would write one to ~/.ray.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if address is not None:
        problem = _unreachable(address)
        if problem:
            connection.send((FAILED, f"is not reachable: {problem}"))
            return
    connection.send((REACHED, None))
    try:
        import ray

        _connect(ray, address, folder)
        slots = _slots(ray.cluster_resources(), device)
    except Exception as error:
        connection.send((FAILED, f"cannot be used: {one_line(error)}"))
        return
    if not slots:
        connection.send((FAILED, "has no GPU"))
        return
    reached = address or ray.get_runtime_context().gcs_address
    connection.send((CONNECTED, (reached, slots)))
    with contextlib.suppress(EOFError, OSError):
        Actors(ray, connection, device).follow()
    ray.shutdown()


def _set_apart() -> None:
    """Leave the terminal's process group, be silent, and adopt the orphans among Ray's processes."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)  # _watch() does more


def _watch(parent: int, address: str | None, folder: str | None) -> None:
    """End this process after its parent, and a local cluster with it, whose agents would run for a minute."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    if address is None:
        end_descendants(os.getpid())
    else:
        time.sleep(_CLOSE_LIMIT_S)  # meanwhile follow() ends the actors
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _unreachable(address: str) -> str:
    """Return why no gRPC server answers at an address, or "" if one does, or the address has no port."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as probe:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return ""
            probe.sendall(_HTTP2_HELLO)
            answer = probe.recv(9)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return "" if answer[3:4] == _SETTINGS else "what answers is not Ray"


def _connect(ray: Any, address: str | None, folder: str | None) -> None:
    """Connect to a cluster, or start a local one."""
    quiet = {"log_to_driver": False, "logging_level": "CRITICAL"}
    if address is not None:
        if address.startswith("ray://"):
            from ray.util.client import worker

            worker.INITIAL_TIMEOUT_SEC = 1  # give up after 7 s, not 35; a server answers at once
        ray.init(address=address, **quiet)
        return
    for attempt in range(_STARTS):
        try:
            ray.init(
                address="local",
                num_cpus=cores(),
                include_dashboard=False,
                object_store_memory=_OBJECTS_BYTES,
                _temp_dir=folder,
                _system_config={"memory_monitor_refresh_ms": 0},  # the actors watch the memory
                **quiet,
            )
            return
        except Exception:
            if attempt == _STARTS - 1:
                raise
            ray.shutdown()


def _slots(resources: dict[str, float], device: str) -> int:
    """Return how many tasks a cluster can run at a time."""
    if device == "cuda":
        return int(resources.get("GPU", 0))
    return max(1, int(resources.get("CPU", 0)))


class Actors:
    """The actors of one engine, by number."""

    def __init__(self, ray: Any, connection: Connection, device: str) -> None:
        from attnlab.tasks.ray_actor import Actor

        self._ray, self._connection, self._device = ray, connection, device
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        needs = {"num_cpus": 0, "num_gpus": 1} if device == "cuda" else {"num_cpus": 1}
        self._class = ray.remote(Actor).options(max_restarts=0, max_task_retries=0, **needs)
        self._job: Any = None  # a reference to the pickled job

    def follow(self) -> None:
        """Follow requests until CLOSE; end all actors."""
        follow: dict[str, Callable[..., None]] = {
            JOB: self._set_job,
            START: self._start,
            RUN: self._run,
            KILL: self._kill,
        }
        try:
            while True:
                request, *arguments = self._connection.recv()
                if request == CLOSE:
                    return
                follow[request](*arguments)
        finally:
            for number in [*self._actors]:
                self._kill(number)

    def _set_job(self, job: bytes) -> None:
        self._job = self._ray.put(job)

    def _start(self, number: int) -> None:
        actor = self._actors[number] = self._class.remote(self._device)
        self._when_done(number, actor.place.remote(), READY)

    def _run(self, number: int, task: Any) -> None:
        self._when_done(number, self._actors[number].run.remote(self._job, task), DONE)

    def _kill(self, number: int) -> None:
        actor = self._actors.pop(number, None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)

    def _when_done(self, number: int, result: Any, kind: str) -> None:
        """Send the value of a result, or why its actor was lost, as soon as it is known."""

        def send(future: Any) -> None:
            error = future.exception()
            message: tuple[str, Any]
            if error is None:
                message = kind, future.result()
            else:
                message = LOST, (one_line(error), bool(_MEMORY.search(str(error))))
            with self._lock, contextlib.suppress(OSError):
                self._connection.send((number, *message))

        result.future().add_done_callback(send)


def one_line(error: BaseException) -> str:
    """Return the line of one of Ray's errors that states the cause."""
    text, cause = str(error), error.__cause__
    while cause is not None:
        text, cause = f"{text}\n{cause}", cause.__cause__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if _CAUSE.search(line)]
    line = (causes or lines or [type(error).__name__])[-1]
    return line.partition(" Some common causes")[0][:300]


_END_S = 1.0


def end_tree(root: int, proc: Path = Path("/proc")) -> None:
    """Kill a process and its descendants, the descendants first."""
    end_descendants(root, proc)
    _kill(root)


def end_descendants(root: int, proc: Path = Path("/proc")) -> None:
    """Kill the descendants of a process.

    None escapes if ``root`` adopts orphans (PR_SET_CHILD_SUBREAPER). Without ``/proc`` none is found.
    """
    end = time.monotonic() + _END_S
    while time.monotonic() < end:
        found = descendants(root, proc)
        if not found:
            break
        for process in found:
            _kill(process)
        time.sleep(0.01)


def descendants(root: int, proc: Path = Path("/proc")) -> set[int]:
    """Return the processes below ``root`` that have not ended."""
    parents = dict[int, int]()
    for entry in proc.iterdir() if proc.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found, new = set[int](), {root}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
