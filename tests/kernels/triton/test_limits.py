"""Limits of interpreted runs: operations, processor time, and what a stopped run leaves behind."""

import signal
import threading
import time
from importlib.util import find_spec

import pytest
import torch

from attnlab.case.errors import KernelFailed
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.kernels.triton.lockstep.launch import using_lockstep
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.kernels.triton.replay import Replay
from attnlab.kernels.triton.run_log import Budget, TooLong, limited, limiting_reruns

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton extra")
if find_spec("triton") is not None:
    triton = interpreter.interpreted_triton()
    tl = triton.language

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
    assert time.process_time() - began < 10
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
        replay.run(None, {endless.fn: loops})
    assert time.process_time() - began < 5
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
