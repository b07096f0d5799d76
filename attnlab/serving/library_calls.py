"""Check the calls of a library's attention ops in a running program, each against the reference.

Nothing is known of the program's layers, steps and requests: a call is named by its op and its number in the
process. No wrapper raises: an error is logged once, and the program continues unchanged.
"""

import dataclasses
import functools
import inspect
import multiprocessing.util
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import AttnLabError
from attnlab.case.platforms import platform_of
from attnlab.kernels.triton.interpreter import noting_bfloat16
from attnlab.library.op import Op
from attnlab.recorder.arguments import BoundArguments, binder, release_of
from attnlab.recorder.records import call_of, output_of, stated
from attnlab.recorder.snapshot import copied
from attnlab.serving.begun_op import Rows, check_output
from attnlab.serving.capture_state import CaptureState, KeptCalls, Observation, RecordFile
from attnlab.serving.settings import CaptureSettings
from attnlab.tensors.call import STOCK_BFLOAT16, KernelCall, Origin

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowsOfCall(Rows):
    """The rows of a call's output."""

    call: KernelCall

    def place_of(self, row: int) -> tuple[int, str | None, int]:
        starts = self.call.query_start_loc.to(torch.int64)
        seq = int(torch.searchsorted(starts, row, right=True)) - 1
        return seq, None, int(self.call.seq_lens[seq]) - int(starts[seq + 1]) + row


class LibrarySession:
    """The capture of a library's calls in this process; a child that is forked counts its own."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings, self._library = settings, settings.library or ""
        self._records = RecordFile(Path(settings.out))
        self._begin_process()
        multiprocessing.util.register_after_fork(self, LibrarySession._begin_process)

    def _begin_process(self) -> None:
        """Begin anew, also in a child of multiprocessing, which has lost its parent's finalizers."""
        self._state = CaptureState(self._settings, self._records)
        self._kept = KeptCalls(self._records, self._settings.max_bytes)
        self._inside, self._is_started = threading.local(), False
        multiprocessing.util.Finalize(None, self._state.tally.write, exitpriority=100)

    def wrapper(self, ops: Sequence[Op], module: str, original: Function) -> Function:
        """Return a function that makes a call of an op and checks it.

        ``ops``: the records of the function; the first that states the arguments is used.
        """
        bind = binder(inspect.signature(original))

        @functools.wraps(original)
        def checking(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "is_op", False) or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                self._state.tally.counts["graph_steps"] += 1
                return original(*args, **kwargs)
            begun = self._begin(ops, module, lambda: bind(args, kwargs))
            self._inside.is_op = True
            try:
                with noting_bfloat16() as undecided:
                    result = original(*args, **kwargs)
            finally:
                self._inside.is_op = False
            if begun is not None and undecided:
                self._state.tally.unchecked[f"values of {begun.name}: {STOCK_BFLOAT16}"] += 1
            elif begun is not None:
                with self._state.guarded(begun.name):
                    self._end(begun, result)
            return result

        return checking

    def _begin(
        self, ops: Sequence[Op], module: str, bound: Callable[[], BoundArguments]
    ) -> "_Begun | None":
        """Count a call, and note what must be known before it runs; None if its values are not checked."""
        state, settings = self._state, self._state.settings
        begun = None
        with state.guarded(f"{module}.{ops[0].function}"):
            if not self._is_started:
                self._start()
            if settings.rank is not None and state.rank not in range(*settings.rank):
                return None
            number = state.tally.counts["steps"]
            state.tally.counts["steps"] += 1
            state.tally.write_sometimes()
            is_sampled = random.Random(number).random() < settings.sample
            is_requested = settings.is_requested(None, number)
            if is_sampled or is_requested:
                arguments = bound()
                output = stated(ops[0], arguments).get("output")
                begun = _Begun(
                    ops=ops,
                    name=f"{module}.{ops[0].function}",
                    number=number,
                    arguments=arguments,
                    before=copied(output) if isinstance(output, torch.Tensor) else None,
                    is_sampled=is_sampled,
                    is_requested=is_requested,
                )
        return begun

    def _start(self) -> None:
        """Record that this process calls ops of the library."""
        self._is_started = True
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._state.rank = torch.distributed.get_rank()
        release, settings = release_of(self._library), self._settings.to_json()
        facts = {"rank": self._state.rank, "library": self._library, "release": release}
        self._records.write("started", {**facts, "settings": settings})

    def _end(self, begun: "_Begun", result: Any) -> None:
        """Check a call that has returned, and keep it if it is wrong or was asked for."""
        state = self._state
        made, why = self._read(begun, result)
        state.tally.counts["ops"] += 1
        if made is None or why:
            state.tally.unchecked[f"values of {begun.name}: {why}"] += 1
        if made is None:
            return
        wrong: list[Observation] = []
        if begun.is_sampled and not why:
            place = RowsOfCall(
                call=made, layer=begun.name, step_number=begun.number, rank=state.rank
            )
            wrong = check_output(state, place, made, is_sampled=True, seed=begun.number)
        if wrong or begun.is_requested:
            name = f"call{begun.number:06d}-rank{state.rank}-{begun.name.rpartition('.')[2]}"
            self._kept.keep_checked(
                made, wrong, name=f"{name}-{os.getpid()}", layer=begun.name, step=begun.number
            )
        state.tally.observe(wrong)

    def _read(self, begun: "_Begun", result: Any) -> tuple[KernelCall | None, str]:
        """Return the call and "", or why its values are not checked."""
        why = ""
        best: KernelCall | None = None
        for op in begun.ops:
            try:
                output = output_of(op, begun.arguments, result)
                made = call_of(op, begun.arguments, self._origin(begun), output)
            except (AttnLabError, RuntimeError, KeyError, IndexError, TypeError) as error:
                why = why or " ".join(f"{error}".split())
                continue
            if made.output is None:
                why = why or "an output that was not returned"
                continue
            if begun.before is not None and begun.before.numel() == made.output.numel():
                made = dataclasses.replace(made, before=begun.before.view(made.output.shape))
            if made.query.dtype == torch.float32 and made.query.device.type == "cuda":
                return made, "float32 on a GPU, which may multiply in TF32"
            if not made.unknown_arguments:
                return made, ""
            best, why = made, f"with {', '.join(made.unknown_arguments)}"
        return best, why

    def _origin(self, begun: "_Begun") -> Origin:
        device = next(
            (one.device for one in begun.arguments.values() if isinstance(one, torch.Tensor)),
            torch.device("cpu"),
        )
        return Origin(
            op=begun.name,
            program=self._library,
            release=release_of(self._library),
            platform=platform_of(device),
            step=begun.number,
            rank=self._state.rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Begun:
    """A call that runs: its arguments, and a copy of the output's buffer before the call."""

    ops: Sequence[Op]
    name: str
    number: int
    arguments: BoundArguments
    before: torch.Tensor | None
    is_sampled: bool
    is_requested: bool
