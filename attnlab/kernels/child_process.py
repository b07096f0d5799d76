"""End a child process when its parent ends, however the parent ends.

python child_process.py PARENT COMMAND…   run a command that ends with the process PARENT
"""

import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any, NoReturn, TypeVar

# A forked child could not use a GPU that its parent uses, nor torch's threads.
START_METHOD = "spawn"
# Linear algebra reads these variables when it is loaded; where several processes run, each uses one thread.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_INTERVAL_S = 0.5


def end_with_parent(parent: int) -> None:
    """Kill this process as soon as the process ``parent`` has ended. Call it first in the child.

    On Linux the kernel sends SIGKILL, also while native code runs. Elsewhere a thread checks the parent
    every half second. The parent's *thread* that started the child must live as long as the child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the request
        os._exit(1)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs ``command`` and ends with this process, from its start on.

    Only on Linux, where the request to the kernel outlives exec; elsewhere ``command`` itself.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-S", "-E", os.path.abspath(__file__), str(os.getpid()), *command]


def start_context(is_copy: bool = False) -> Any:
    """Return the multiprocessing context whose processes run :func:`run_in_child`.

    ``is_copy``: they may be copies of this process, which need no imports, where that is safe: no GPU is in
    use, and neither threads nor a variable of ONE_THREAD allow a second thread.
    """
    has_one_thread = threading.active_count() == 1 and all(
        os.environ.get(name) == "1" for name in ONE_THREAD
    )
    return multiprocessing.get_context(
        "fork" if is_copy and has_one_thread and can_copy() else START_METHOD
    )


def run_in_child(job: bytes, sender: Any) -> None:
    """Run a pickled (function, arguments) as the target of a multiprocessing child that ends with its parent.

    The function gets ``sender``, then the arguments. They are restored after the request to end, because
    that may take seconds.
    """
    parent = multiprocessing.parent_process()
    end_with_parent(os.getppid() if parent is None or parent.pid is None else parent.pid)
    function, arguments = pickle.loads(job)
    function(sender, *arguments)


Sender = Callable[[Any], object]
T = TypeVar("T")
R = TypeVar("R")
Function = Callable[[Any], None]  # gets a function that sends things to the process that waits


def run_in_copy(function: Function, receive: Sender, limit_s: float) -> str:
    """Run a function in a copy of this process, so that a crash of it does not end this one.

    The function gets a function that sends things to ``receive``; what it sent before a crash is received.
    The copy is ended if it uses ``limit_s`` seconds of processor time. Returns how it ended, such as
    "SIGSEGV", or "" if the function returned. Raises what the function raises.

    Without fork, or with a GPU in use, the function runs in this process.
    """
    return run_in_copies([function], receive, limit_s)[0]


def run_in_copies(functions: Sequence[Function], receive: Sender, limit_s: float) -> list[str]:
    """Run functions at the same time, each in a copy of this process as :func:`run_in_copy` does.

    If ``receive`` returns True, it needs nothing else: all copies end.
    """
    if not can_copy():
        for function in functions:
            function(receive)
        return [""] * len(functions)
    copies = [_started(function, limit_s) for function in functions]
    left: dict[Any, int] = {reader: at for at, (reader, _) in enumerate(copies)}
    errors, returned = list[Exception](), set[int]()
    try:
        while left:
            for reader in connection.wait([*left]):
                is_end, thing = _received(reader)
                if is_end:
                    at = left.pop(reader)
                    returned |= set() if thing is EOFError else {at}
                    errors += [thing] if isinstance(thing, Exception) else []
                elif receive(thing) is True:
                    return [""] * len(functions)
    finally:
        for at in left.values():  # nothing else is needed, or Ctrl-C
            os.kill(copies[at][1], signal.SIGKILL)
        ended = [_ended(*copy) for copy in copies]
    for error in errors:
        raise error
    return ["" if at in returned else how for at, how in enumerate(ended)]


def _started(function: Function, limit_s: float) -> tuple[connection.Connection, int]:
    """Start a copy of this process that runs a function; return what it sends to, and its process id."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        child = os.fork()
    if not child:
        end_with_parent(parent)
        _serve(function, writer, limit_s)
    writer.close()
    return reader, child


def _received(reader: Any) -> tuple[bool, Any]:
    """Return whether a copy has ended, and what it sent: the exception that its function raised, or None;
    EOFError, the class, if it did not return."""
    try:
        found: tuple[bool, Any] = reader.recv()
    except (EOFError, OSError):
        return True, EOFError
    return found


def _ended(reader: Any, child: int) -> str:
    """Wait for a copy; return how it ended, if it did not return."""
    reader.close()
    _, status = os.waitpid(child, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exit"


def _serve(function: Function, writer: Any, limit_s: float) -> NoReturn:
    """Run the function in the child, which uses one thread: the parent's other threads do not exist in it."""
    import resource

    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit_s < math.inf:
        most, (_, hard) = (
            int(time.process_time() + limit_s) + 1,
            resource.getrlimit(resource.RLIMIT_CPU),
        )
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_CPU, (most, hard))  # SIGXCPU
    try:
        try:
            function(lambda thing: writer.send((False, thing)))
            writer.send((True, None))
        except BaseException as error:
            writer.send((True, restorable(error)))
    finally:
        os._exit(0)


@dataclass(frozen=True, slots=True)
class Forked:
    """A copy of this process that computes something: its id, and the read end of its pipe."""

    child: int
    reader: connection.Connection

    def kill(self) -> None:
        """End the copy; :meth:`result` must follow."""
        os.kill(self.child, signal.SIGKILL)

    def result(self) -> tuple[Any, Exception | None]:
        """Wait for the copy; return what its function returned, and the exception that it raised."""
        is_end, found = _received(self.reader)
        how = _ended(self.reader, self.child)
        if not is_end:
            return pickle.loads(found), None
        if found is EOFError:
            return None, RuntimeError(f"a process of the interpreter ended: {how}")
        return None, found


def fork(function: Callable[[], Any]) -> Forked:
    """Call a function in a copy of this process, which uses one thread of torch."""
    reader, child = _started(lambda send: send(pickle.dumps(function())), math.inf)
    return Forked(child, reader)


def in_copies(function: Callable[[T], R], items: Iterable[T], count: int) -> Iterator[R]:
    """Yield what a function returns for each item, in order; this process and copies of it share the items.

    ``count``: of the processes. What a copy returns is pickled; what it changes is lost. Raises what the
    function raises, when its item is due. The items of a copy that crashes are left to this process. If the
    generator is closed, the copies end.
    """
    items = list(items)
    count = min(count, len(items)) if can_copy() else 1

    def serve(first: int, send: Sender) -> None:
        for item in items[first::count]:
            send(pickle.dumps(function(item)))

    copies = [_started(partial(serve, first), math.inf) for first in range(1, count)]
    here = {0}  # shares that this process has
    try:
        for at, item in enumerate(items):
            share = at % count
            if share not in here:
                is_end, thing = _received(copies[share - 1][0])
                if isinstance(thing, Exception):
                    raise thing
                if not is_end:
                    yield pickle.loads(thing)
                    continue
                here.add(share)
            yield function(item)
    finally:
        for _, child in copies:
            os.kill(child, signal.SIGKILL)
        for copy in copies:
            _ended(*copy)


@contextmanager
def in_background(function: Callable[[], R], count: int) -> Iterator[Callable[[], R]]:
    """Yield a function that returns what ``function`` returns, and raises what it raises.

    With ``count`` of at least 2 processes, a copy of this one computes it from now on, else this one does
    when it is asked. If the result is not asked for, the copy ends.
    """
    if count < 2 or not can_copy():
        yield function
        return
    copy, is_asked = fork(function), False

    def result() -> R:
        nonlocal is_asked
        is_asked = True
        found, error = copy.result()
        if error is not None:
            raise error
        return found  # type: ignore[no-any-return]

    try:
        yield result
    finally:
        if not is_asked:
            copy.kill()
            copy.result()


def restorable(error: BaseException) -> Exception:
    """Return an error that another process can restore, of the same type if possible."""
    try:
        found = pickle.loads(pickle.dumps(error))
    except Exception:
        found = None
    if isinstance(found, Exception):
        return found
    return RuntimeError(f"{type(error).__name__}: {error}"[:10000])


def can_copy() -> bool:
    """Answer whether a forked copy of this process can compute what this process computes."""
    torch = sys.modules.get("torch")
    uses_gpu = torch is not None and torch.cuda.is_initialized()
    return hasattr(os, "fork") and sys.platform != "darwin" and not uses_gpu


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL_S)
    os._exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
