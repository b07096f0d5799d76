"""Launches under Triton's interpreter, where they differ from the stock launch."""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlab.case.errors import KernelFailed
from attnlab.kernels.child_process import run_in_copies
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.interpreter import load_triton
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.kernels.triton.lockstep.launch import using_lockstep
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.kernels.triton.replay import Replay
from attnlab.kernels.triton.run_log import Budget, TooLong, limited, limiting_reruns
from attnlab.kernels.triton.type_cache import _broadcast, _computation_type

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton extra")
if find_spec("triton") is not None:
    triton = interpreter.interpreted_triton()
    tl = triton.language


@pytest.fixture(scope="module")
def kernels():
    """Return small kernels, made by the lab's jit."""

    @triton.jit
    def far(out, stride: tl.int64, times):
        tl.store(out, stride * times)

    @triton.jit
    def near(out, stride, times):
        tl.store(out, stride * times)

    @triton.jit
    def rank0(out, source):
        one = tl.load(source)
        row = one[None, :] + tl.arange(0, 4)[None, :]
        tl.store(out + tl.arange(0, 4)[None, :], row)

    @triton.jit
    def number(out, fail: tl.constexpr):
        at = tl.program_id(0) * 4 + tl.program_id(1)
        if fail and at == 7:
            tl.static_assert(False, "program 7")
        tl.store(out + at, at + 1)

    return {"far": far, "near": near, "rank0": rank0, "number": number}


def test_int64_annotations_are_honoured(kernels) -> None:
    """A stride annotated tl.int64 does not overflow; one without annotation does."""
    out = torch.zeros(1, dtype=torch.int64)
    kernels["far"][(1,)](out, 2**30, 8)
    assert int(out) == 2**33
    kernels["near"][(1,)](out, 2**30, 8)
    assert int(out) == 0


@pytest.mark.parametrize("debug", [False, True])
def test_overflow_checks_are_computed_in_debug_mode_only(kernels, monkeypatch, debug) -> None:
    """Without it nothing reports them. The options are the same after a launch."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder

    checked = []
    options = dataclasses.replace(interpreter_builder.options, debug=debug)
    monkeypatch.setattr(interpreter_builder, "options", options)
    monkeypatch.setattr(TritonSemantic, "device_assert", lambda *words: checked.append(words))
    out = torch.zeros(1, dtype=torch.int64)
    kernels["near"][(1,)](out, 3, 8)
    assert int(out) == 24
    assert bool(checked) == debug
    assert interpreter_builder.options is options


def test_a_full_slice_of_a_scalar_adds_no_dimension(kernels) -> None:
    """bn[None, :] of a loaded scalar, as in vLLM's prefill kernel up to 0.13.0."""
    out = torch.zeros(4, dtype=torch.int64)
    kernels["rank0"][(1,)](out, torch.tensor([5]))
    assert out.tolist() == [5, 6, 7, 8]


def test_programs_are_shared_out(kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes write the same as one, and skipped programs write nothing."""
    monkeypatch.setattr(interpreter, "_ALONE_S", 0.0)
    seen = []
    plan = LaunchPlan(
        needed=lambda kernel, args, program: program[1] != 3,
        processes=3,
        on_programs=lambda done, total: seen.append((done, total)),
    )
    out = interpreter.shared_copy(torch.zeros(5 * 4, dtype=torch.int32))
    with launching(plan):
        kernels["number"][(5, 4)](out, fail=False)
    assert out.view(5, 4).tolist() == [[4 * i + 1, 4 * i + 2, 4 * i + 3, 0] for i in range(5)]
    assert seen[-1] == (15, 15)


def test_threads_take_turns(kernels) -> None:
    """A panel computes in a thread of its own; its launches must not change those of the notebook."""

    def launch(_: int) -> list[int]:
        out = torch.zeros(5 * 4, dtype=torch.int32)
        with launching(LaunchPlan()):
            kernels["number"][(5, 4)](out, fail=False)
        return out.tolist()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(launch, range(128)))
    assert all(numbers == list(range(1, 21)) for numbers in found), found


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_an_error_in_any_process_is_raised(kernels, monkeypatch, processes: int) -> None:
    """The error of program 7 arrives from any process, and no child remains."""
    fork, forked = interpreter.fork, []

    def record(*args):
        forked.append(fork(*args))
        return forked[-1]

    monkeypatch.setattr(interpreter, "_ALONE_S", 0.0)
    monkeypatch.setattr(interpreter, "fork", record)
    out = interpreter.shared_copy(torch.zeros(20, dtype=torch.int32))
    with (
        launching(LaunchPlan(processes=processes)),
        pytest.raises(Exception, match="program 7"),
    ):
        kernels["number"][(5, 4)](out, fail=True)
    assert len(forked) == processes - 1
    for one in forked:
        with pytest.raises(ChildProcessError):
            os.waitpid(one.child, os.WNOHANG)


def test_nothing_of_triton_stays_changed(kernels) -> None:
    """After a launch Triton's names are restored."""
    from triton.runtime import interpreter as stock

    def names() -> list:
        return [
            tl.tensor.__dict__.get("__getitem__"),
            tl.tensor.__init__,
            tl.block_type.__init__,
            tl.load,
            stock._get_np_dtype,
            stock.InterpretedFunction.__call__,
        ]

    before = names()
    kernels["number"][(1, 1)](torch.zeros(4, dtype=torch.int32), fail=False)
    assert names() == before


def test_a_missing_triton_is_told() -> None:
    """Without the triton extra, one line names it, and nothing stays imported."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from attnlab.cli.main import main\n"
        "main(['run', '--backend', 'vllm', '--source', sys.argv[1], '--num-heads', '1',"
        " '--query-lens', '1', '--ctx-lens', '3'])\n"
        "sys.exit(any(name.startswith('vllm') for name in sys.modules))"
    )
    with tempfile.TemporaryDirectory() as folder:
        ops = Path(folder, "vllm", "v1", "attention", "ops")
        ops.mkdir(parents=True)
        (ops / "chunked_prefill_paged_decode.py").write_text("")
        done = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
        )
    assert "pip install 'attnlab[triton]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process cannot fork here")
def test_a_launch_that_is_ended_does_not_wait_for_its_children():
    """If on_programs raises during a split launch, the other processes end at once."""

    class Enough(BaseException):
        pass

    forked = []

    def fork(*args):
        forked.append(interpreter_fork(*args))
        return forked[-1]

    def on_programs(done, total):
        if forked:
            raise Enough

    interpreter_fork = interpreter.fork
    plan = LaunchPlan(processes=2, on_programs=on_programs)
    programs = [(i, 0, 0) for i in range(2000)]  # more than 100 s per process
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "fork", fork)
        with pytest.raises(Enough):
            interpreter._run_all(lambda program: time.sleep(0.1), programs, plan)
    assert time.monotonic() - start < 60
    (one,) = forked
    with pytest.raises(ChildProcessError):  # no child remains
        os.waitpid(one.child, os.WNOHANG)


def test_copies_of_a_process_do_not_share_what_a_probe_records() -> None:
    """Trial edits run recorded launches again in several copies at the same time."""

    def fill(tensor: torch.Tensor) -> float:
        run_in_copies([lambda send: send(float(tensor.fill_(1.0).sum()))], lambda thing: None, 10.0)
        return float(tensor.sum())

    assert fill(interpreter.shared_copy(torch.zeros(3))) == 3
    with probing(Probe(records=True)):
        recorded = interpreter.shared_copy(torch.zeros(3))
    assert fill(recorded) == 0


# Limits of interpreted runs: operations, processor time, and what a stopped run leaves behind.


if find_spec("triton") is not None:

    @triton.jit
    def endless(out, STEP: tl.constexpr):
        count = tl.program_id(0)
        while count < 10:
            count += STEP
        tl.store(out + tl.arange(0, 16), count.to(tl.float32))

    @triton.jit
    def idle(out, TIMES: tl.constexpr):
        for _ in range(TIMES):
            pass
        tl.store(out + tl.arange(0, 16), 1.0)


OUT = torch.zeros(1, 1, 16)


@pytest.mark.parametrize(("kernel", "number"), [("endless", 0), ("idle", 1 << 60)])
def test_a_loop_without_an_access_to_memory_is_stopped(kernel: str, number: int) -> None:
    """By its operations or, if it has none, by its processor time; nothing of Triton stays changed."""
    from triton.runtime import interpreter as stock

    before = stock.InterpreterBuilder.create_masked_load, tl.load, tl.dtype.to_ir
    name = {"endless": "STEP", "idle": "TIMES"}[kernel]
    budget = Budget(operations=20_000, seconds=0.5)
    began = time.process_time()
    with pytest.raises(TooLong), probing(Probe(budget=budget)), launching(LaunchPlan()):
        globals()[kernel][(1,)](OUT, **{name: number})
    assert time.process_time() - began < 60
    assert (stock.InterpreterBuilder.create_masked_load, tl.load, tl.dtype.to_ir) == before
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize(("kernel", "number"), [("endless", 0), ("idle", 1 << 60)])
def test_operations_are_stopped_in_every_thread(kernel: str, number: int, lockstep: bool) -> None:
    """Only the main thread has a timer; the count of operations and of iterations needs none."""
    found: list[str] = []
    name = {"endless": "STEP", "idle": "TIMES"}[kernel]

    def work() -> None:
        budget = Budget(operations=5000, seconds=60.0)
        try:
            with probing(Probe(budget=budget)), using_lockstep(lockstep), launching(LaunchPlan()):
                globals()[kernel][(1,)](OUT, **{name: number})
        except TooLong:
            found.append("stopped")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == ["stopped"]


def test_a_rerun_that_does_not_end_fails() -> None:
    """A kernel may loop for ever in a further case; then that case is left out."""
    with limiting_reruns(0.3), launching(LaunchPlan()):
        idle[(1,)](OUT, TIMES=3)
        with pytest.raises(KernelFailed, match=r"idle does not end in 0\.3 s"):
            idle[(1,)](OUT, TIMES=1 << 60)


def test_a_replay_of_an_edited_kernel_is_stopped() -> None:
    """An edit that loops for ever needs more operations than the recorded run allows."""
    with probing(Probe(records=True)) as probe:
        endless[(1,)](OUT, STEP=1)
    replay = Replay(probe.launches, OUT.shape)
    assert probe.launches[0].programs[0].operations > 10

    def loops(out, STEP):
        value = tl.program_id(0)
        while True:
            value += STEP

    began = time.process_time()
    with pytest.raises(TooLong):
        replay.run(None, {endless.fn: lambda: loops})
    assert time.process_time() - began < 60
    assert float(replay.run(None, {})[0, 0, 0]) == 10.0


def test_a_block_within_its_budget_is_not_stopped() -> None:
    """The timer is off after the block; a profiler that has it keeps it."""
    with limited(Budget(operations=1, seconds=0.2)):
        pass
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass
    signal.signal(signal.SIGPROF, lambda *_: None)
    try:
        with limited(Budget(operations=1, seconds=0.1)):
            assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)


# Cached type computations of Triton's interpreter: the same results as the original, again and again.


SHAPES = ((), (1,), (4,), (1, 4), (2, 1), (2, 4))


@pytest.fixture(scope="module")
def types_of() -> Any:
    """Return Triton's interpreter."""
    load_triton(interpret=True)
    from triton.runtime import interpreter

    return interpreter


def tensor(types_of: Any, shape: tuple[int, ...], dtype: Any, first: int = 0) -> Any:
    """Return a tensor with different elements; () is a scalar, which the interpreter has as shape (1,)."""
    tl = types_of.tl
    elements = np.arange(first, first + int(np.prod(shape)))
    data = elements.reshape(shape or (1,)).astype(types_of._get_np_dtype(dtype))
    handle = types_of.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


@pytest.mark.parametrize("left", SHAPES)
def test_values_are_broadcast_as_by_the_original(types_of: Any, left: tuple[int, ...]) -> None:
    """At the first call of two types, and with other values at the next."""
    semantic, tl = types_of.interpreter_semantic, types_of.tl
    original = type(semantic).broadcast_impl_value
    broadcast = _broadcast(original)
    for right, first in itertools.product(SHAPES, (0, 10)):
        lhs = tensor(types_of, left, tl.float32, first)
        rhs = tensor(types_of, right, tl.int32, first + 3)
        for got, expected in zip(
            broadcast(semantic, lhs, rhs), original(semantic, lhs, rhs), strict=True
        ):
            assert got.type == expected.type
            assert got.handle.dtype == expected.handle.dtype
            assert got.handle.data.dtype == expected.handle.data.dtype
            assert got.handle.data.shape == expected.handle.data.shape
            assert got.handle.data.tolist() == expected.handle.data.tolist()


def test_incompatible_shapes_raise_each_time(types_of: Any) -> None:
    semantic, tl = types_of.interpreter_semantic, types_of.tl
    broadcast = _broadcast(type(semantic).broadcast_impl_value)
    values = [tensor(types_of, shape, tl.float32) for shape in ((2, 4), (2, 8))]
    for _ in range(2):
        with pytest.raises(ValueError, match="incompatible dimensions"):
            broadcast(semantic, *values)


def test_computation_types_are_those_of_the_original(types_of: Any) -> None:
    """For pairs of types, of scalars and of tensors; an error is raised each time."""
    semantic, tl = types_of.interpreter_semantic, types_of.tl
    original = type(semantic).computation_type_impl
    cached = _computation_type(original)
    types = (
        tl.int1,
        tl.int32,
        tl.uint32,
        tl.int64,
        tl.float16,
        tl.bfloat16,
        tl.float32,
        tl.float8e5,
    )
    flags = (False, True)
    for arguments in itertools.product(types, flags, types, flags, flags):
        expected = outcome(original, semantic, arguments)
        assert outcome(cached, semantic, arguments) == expected, arguments
        assert outcome(cached, semantic, arguments) == expected, arguments


def outcome(compute: Any, semantic: Any, arguments: tuple[Any, ...]) -> object:
    try:
        return compute(semantic, *arguments)
    except TypeError as error:
        return str(error)
