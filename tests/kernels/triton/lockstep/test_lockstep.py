"""Lockstep: the same bits, notes and reads as one program after another."""

import numpy as np
import pytest
import torch
from helpers.cases import same_bits
from helpers.sources import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlab
from attnlab.case.errors import Unavailable
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.kernels.triton.lockstep import control, launch, memory
from attnlab.kernels.triton.lockstep.control import Batch, Diverged, Range, Refused
from attnlab.kernels.triton.lockstep.launch import using_lockstep
from attnlab.kernels.triton.lockstep.operations import converted
from attnlab.kernels.triton.probe import Probe, joined, probing, stores_of
from attnlab.kernels.triton.run_log import Watched, numbers_outside, other_outside

pytestmark = needs_triton
CONTROL = ("branch", "loops", "begins", "returns", "jumps", "stores", "kinds", "conditions")
SIZED = ("branch", "loops", "returns")
NUMBERS = torch.tensor([5, 3, 0, 8, 4, 9, 3, 12, 1, 7, 6, 2, 5], dtype=torch.int32)


@pytest.fixture(scope="module")
def kernels():
    """Provide the module of small kernels."""
    from helpers import lockstep_kernels

    return lockstep_kernels


def run_both(kernel, grid, *args, **fixed):
    """Run a launch one program after another, and in lockstep; return the log of the latter.

    Checks that the tensors have the same bits, and the logs the same overflows and accesses outside, in the
    same order. Afterwards the tensors have the results.
    """
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
    alone, together = LaunchPlan(), LaunchPlan()
    with using_lockstep(False), launching(alone):
        kernel[grid](*copies, **fixed)
    with using_lockstep(True), launching(together):
        kernel[grid](*args, **fixed)
    for expected, found in zip(copies, args, strict=True):
        assert not isinstance(expected, torch.Tensor) or same_bits(found, expected)
    log = together.observed
    assert list(log.wraps.items()) == list(alone.observed.wraps.items())
    assert list(log.outside.items()) == list(alone.observed.outside.items())
    assert not alone.observed.alone
    return log


def run_control(kernels, name: str, numbers: torch.Tensor):
    """Run a kernel whose programs take different ways; return the log of lockstep."""
    fixed = {"SIZE": 4} if name in SIZED else {}
    out = torch.full((len(numbers) * 4,), -1.0)
    return run_both(getattr(kernels, name), (len(numbers),), numbers, out, **fixed)


@pytest.mark.parametrize("name", CONTROL)
def test_programs_that_take_different_ways(kernels, name):
    assert not run_control(kernels, name, NUMBERS).alone


@pytest.mark.parametrize("is_together", [False, True])
def test_a_float_is_no_bound_of_a_loop(kernels, is_together):
    """Triton's compiler takes integers alone."""
    target = torch.zeros(4 * len(NUMBERS))
    fails = pytest.raises(Exception, match="integer")
    with using_lockstep(is_together), launching(LaunchPlan()), fails:
        kernels.loops[(len(NUMBERS),)](NUMBERS.float(), target, SIZE=4)


def test_a_loop_variable_is_an_int_of_python(kernels):
    """Python rounds a negative quotient down, a scalar of Triton toward zero."""
    why = {"negative": "a division of negative integers in a loop"}
    assert run_control(kernels, "negative", NUMBERS).alone == why
    assert not run_control(kernels, "negative", NUMBERS + 6).alone


@settings(max_examples=15, deadline=None)
@given(numbers=st.lists(st.integers(0, 12), min_size=1, max_size=9), name=st.sampled_from(CONTROL))
def test_any_programs_together(kernels, numbers, name):
    assert not run_control(kernels, name, torch.tensor(numbers, dtype=torch.int32)).alone


@pytest.mark.parametrize("name", CONTROL)
def test_a_batch_that_is_split_for_its_memory(kernels, name, monkeypatch):
    """Values of at most 6 elements: batches shrink to one program of a block of 4."""
    monkeypatch.setattr(launch, "most_elements", lambda: 6)
    assert not run_control(kernels, name, NUMBERS).alone


def test_memory_that_runs_out_splits_a_batch(kernels, monkeypatch):
    """The first runs fail; halves of the batch run."""
    commit, fails = memory.Tensors.commit, [3]

    def scarce(tensors):
        if fails[0]:
            fails[0] -= 1
            raise MemoryError
        commit(tensors)

    monkeypatch.setattr(memory.Tensors, "commit", scarce)
    assert not run_control(kernels, "loops", NUMBERS).alone
    fails[0] = 1000
    assert run_control(kernels, "loops", NUMBERS).alone == {"loops": "too little memory"}


@pytest.mark.parametrize("programs", [1, 4, 8, 16, 5])
def test_as_many_programs_as_elements(kernels, programs):
    """The axis of programs is never taken for one of a tile, also if it is as long."""
    numbers = torch.arange(programs, dtype=torch.int32) * 3 + 1
    out = torch.zeros(programs * 8, dtype=torch.int32)
    assert not run_both(kernels.scalars, (programs,), numbers, out, SIZE=8).alone
    source, scale = torch.randn(programs * 8), torch.randn(programs)
    tiles = torch.zeros(programs * 64)
    assert not run_both(kernels.shapes, (programs,), source, scale, tiles, SIZE=8).alone


def test_an_extension_to_the_left_is_refused(kernels, monkeypatch, no_records):
    """A scalar of each of 8 programs that is not made a block of 8 would be added along the tile."""
    from triton.language.semantic import TritonSemantic

    out = torch.zeros(64, dtype=torch.int32)
    broadcast = TritonSemantic.broadcast_impl_value

    def careless(semantic, left, right):
        if left.type.is_block() != right.type.is_block():
            return left, right
        return broadcast(semantic, left, right)

    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", careless)
    plan = LaunchPlan()
    with launching(plan):
        kernels.scalars[(8,)](torch.arange(8, dtype=torch.int32), out, SIZE=8)
    assert plan.observed.alone == {
        "scalars": "an operation on values with different numbers of axes"
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_products_and_blocks(kernels, dtype, size):
    """Also with rows of one element, and blocks that torch converts."""
    torch.manual_seed(0)
    left, right = torch.randn(9 * size * 16), torch.randn(size * 16)
    left[3], right[5] = torch.nan, torch.inf
    out = torch.zeros(9 * size * size)
    fixed = {"M": size, "N": size, "K": 16}
    given = left.to(dtype), right.to(dtype), out
    assert not run_both(kernels.product, (9,), *given, **fixed).alone


def test_rows_of_a_table(kernels):
    """Loads of rows that are partly masked, and of one that is outside, which is noted."""
    source = torch.randn(40 * 16)
    where = torch.randint(0, 40, (12 * 16,), dtype=torch.int32)
    where[::5] = -1
    out = torch.full((12 * 16,), 7.0)
    log = run_both(kernels.gather, (12,), source, where, out, 180, SIZE=16)
    assert not log.alone
    assert not log.outside
    assert out[180:].eq(7).all()
    where[37], where[100] = 40, 45
    log = run_both(kernels.gather, (12,), source, where, out, 180, SIZE=16)
    (stray,) = log.outside.values()
    assert stray.place == "0 bytes after the end of source"
    assert not log.alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [None, 7.0, float("nan")], ids=["by address", "7", "nan"])
def test_numbers_outside(kernels, number, dtype):
    """A batch loads the same numbers outside of all tensors as one program, in bfloat16, too."""
    source, out = torch.ones(2, 16, dtype=dtype), torch.zeros(3, 16)
    where = torch.arange(3 * 16, dtype=torch.int32).view(3, 16) % 4
    with other_outside(number):
        log = run_both(kernels.gather, (3,), source, where, out, 48, SIZE=16)
        expected = numbers_outside(torch.arange(32, 64), torch.float32).view(2, 16)
    assert not log.alone
    assert out[:, :2].eq(16).all()
    sums = expected.sum(1).to(dtype).float()
    torch.testing.assert_close(out[0, 2:4], sums, rtol=0, atol=0, equal_nan=True)


def test_overflows_are_noted_in_order(kernels):
    """Of each line the first, in the order of programs: program 0 overflows later than program 2."""
    numbers = torch.tensor([7, 0, 100, 2, 3, 1], dtype=torch.int32)
    log = run_both(kernels.wraps, (6,), numbers, torch.zeros(6, dtype=torch.int32))
    assert len(log.wraps) == 2
    assert not log.alone


def test_reads_are_those_of_each_program(kernels):
    """Slots of a cache by the rows of a program; programs that have left a loop read nothing there."""
    cache, numbers = torch.randn(8, 4), torch.tensor([3, 0, 8, 1, 5, 2], dtype=torch.int32)
    reads = []
    for on in (False, True):
        out = torch.zeros(6, 4)
        plan = LaunchPlan(watched=Watched(rows=(6, 4), new=(0, 0), caches={(8, 4): (0, 1)}))
        with launching(plan), using_lockstep(on):
            kernels.walk[(6,)](numbers, cache, out, SIZE=4)
        assert not plan.observed.alone
        reads.append(plan.observed.reads)
    assert reads[0] == reads[1]
    assert list(reads[0]) == list(reads[1])
    assert reads[1][("cache", (3,))] == {0, 2, 3}
    assert reads[1][("cache", (2,))] == set(range(32))


@pytest.mark.parametrize("name", ["walk", "loops", "shapes", "same_element"])
def test_recorded_accesses_are_those_of_each_program(kernels, name):
    """All loads and stores of a program, as when programs run one after another, which conflicts need."""
    numbers, found = torch.tensor([3, 0, 8, 1, 5, 2], dtype=torch.int32), []
    given = {
        "walk": (numbers, torch.randn(8, 4), torch.zeros(6, 4)),
        "loops": (numbers, torch.zeros(24)),
        "shapes": (torch.randn(24), torch.randn(6), torch.zeros(96)),
        "same_element": (torch.zeros(16), 8),
    }[name]
    fixed = {} if name == "same_element" else {"SIZE": 4}
    for on in (False, True):
        plan = LaunchPlan()
        with launching(plan), using_lockstep(on), probing(Probe(accesses=True)) as probe:
            getattr(kernels, name)[(6,)](*given, **fixed)
        assert not on or bool(plan.observed.alone) == (name == "same_element")
        (log,) = probe.launches
        found.append(
            [(p.program, joined(p.loads).tolist(), joined(p.stores).tolist()) for p in log.programs]
        )
        conflicts = [bool(one.conflicts) for one in stores_of(probe.launches)]
        assert conflicts == [name == "same_element"]
    assert found[0] == found[1]
    assert len({tuple(stores) for _, _, stores in found[1]}) == (3 if name == "same_element" else 6)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("atomic", "the operation atomic_rmw"),
        ("reduction", "a reduction with a function of the kernel"),
        ("stored_first", "a tensor that is both loaded and stored"),
        ("loaded_first", "a tensor that is both loaded and stored"),
        ("walrus", "an assignment expression in walrus"),
    ],
)
def test_what_is_refused_runs_one_program_after_another(kernels, name, why):
    """With the same result, and the reason in the log."""
    log = run_both(getattr(kernels, name), (8,), torch.zeros(16), 8)
    assert log.alone == {name: why}
    assert [one.text() for one in log.launches] == [f"{name}[8]"]


def test_a_mask_of_numbers_is_refused(kernels):
    """The language allows it for a load; NumPy would take the numbers for indices."""
    log = run_both(kernels.mask_of_numbers, (8,), torch.arange(16.0), torch.zeros(16))
    assert log.alone == {"mask_of_numbers": "a mask that is not of type bool"}


@pytest.mark.parametrize("most", [1, 3, 256])
@pytest.mark.parametrize("name", ["equal_element", "same_element", "equal_then_other", "earlier"])
def test_the_last_of_several_programs_stores(kernels, monkeypatch, name, most):
    """In one batch and in several, also if the batches have another order than the programs."""
    monkeypatch.setattr(launch, "MOST", most)
    grid = (4, 3) if name == "earlier" else (8,)
    assert not run_both(getattr(kernels, name), grid, torch.zeros(16), 8).alone


def test_the_order_of_stores_is_lost_without_the_check(kernels, monkeypatch):
    """Programs 0 and 1 store one element; in lockstep the wrong store would be the last."""

    def careless(tensors):
        for store in tensors.stores:
            store.storage.bytes.view(store.bits.dtype)[store.index] = store.bits

    out = torch.zeros(16)
    monkeypatch.setattr(memory.Tensors, "commit", careless)
    with pytest.raises(AssertionError):
        run_both(kernels.same_element, (8,), out, 8)
    assert out[:4].tolist() == [0.0, 4.0, 8.0, 12.0]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_late_refusal_restores_the_tensors(kernels, monkeypatch, processes):
    """Batches that ended before are undone, also those of another process."""
    monkeypatch.setattr(interpreter, "_ALONE_S", -1.0)
    monkeypatch.setattr(launch, "MOST", 2)
    run, found = interpreter._run_all, []

    def looked_at(*args):
        found.append(out.clone())
        run(*args)

    monkeypatch.setattr(interpreter, "_run_all", looked_at)
    out = interpreter.shared_copy(torch.arange(16.0) + 20)
    with launching(plan := LaunchPlan(processes=processes)):
        kernels.late_load[(6,)](out, 8)
    assert plan.observed.alone == {"late_load": "a tensor that is both loaded and stored"}
    assert found[0].equal(torch.arange(16.0) + 20)
    if processes == 1:
        assert out[2:6].tolist() == [2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_a_launch(kernels, monkeypatch, processes):
    """With the same result, notes and number of programs."""
    monkeypatch.setattr(interpreter, "_ALONE_S", -1.0)
    monkeypatch.setattr(launch, "MOST", 2)
    seen = []
    plan = LaunchPlan(processes=processes, on_programs=lambda *done: seen.append(done))
    alone = LaunchPlan()
    numbers = torch.tensor([1, 0, 4, 2, 3, 1, 2, 5, 0, 1, 1], dtype=torch.int32)
    outs = [interpreter.shared_copy(torch.zeros(11, dtype=torch.int32)) for _ in range(2)]
    for out, one, on in ((outs[0], plan, True), (outs[1], alone, False)):
        with launching(one), using_lockstep(on):
            kernels.wraps[(11,)](numbers, out)
    assert outs[0].equal(outs[1])
    assert list(plan.observed.wraps.items()) == list(alone.observed.wraps.items())
    assert not plan.observed.alone
    assert seen[0] == (2, 11)
    assert seen[-1][0] >= 9


def test_conversions_are_those_of_numpy():
    """For every float16, and float32 of all kinds, a NaN that torch would make quiet among them."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[~np.isnan(halves)]
    for numbers in (halves, finite):
        wide = converted(numbers, torch.float32)
        assert (wide.view(np.uint32) == numbers.astype(np.float32).view(np.uint32)).all()
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits[:2] = 0x7F800001, 0xFF812345
    with np.errstate(all="ignore"):
        numbers = bits.view(np.float32)
        short = converted(numbers, torch.float16)
        assert (short.view(np.uint16) == numbers.astype(np.float16).view(np.uint16)).all()


def test_a_split_makes_progress():
    """A batch is never replaced by itself, and a while loop ends."""
    with pytest.raises(Refused, match="split further"):
        Diverged([np.arange(3)])
    with pytest.raises(Refused, match="split further"):
        Diverged([np.arange(3), np.arange(0)])


def test_a_loop_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(control, "_MOST_STEPS", 5)
    from triton.runtime import interpreter as stock

    control.begin(Batch(np.zeros((2, 3), np.int32), np.arange(2), stock))
    try:
        steps = control.While(masks=True)
        goes_on = iter(lambda: steps.goes_on(True), False)
        with pytest.raises(Refused, match="more than 5 iterations"):
            list(goes_on)
        with pytest.raises(Refused, match="step 0"):
            Range(0, 5, 0)
    finally:
        control.begin(None)


def test_interpret_runs_any_launch():
    """The public door: launches of functions that Triton itself made."""
    triton = interpreter.load_triton(True)
    tl = triton.language

    @triton.jit
    def double(source, target, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(target + at, tl.load(source + at) * 2)

    double.fn.__globals__["tl"] = tl
    source, target = torch.arange(64.0), torch.zeros(64)
    for lockstep in (True, False):
        target.zero_()
        with attnlab.interpret(lockstep=lockstep) as log:
            assert launch.is_lockstep() is lockstep
            double[(8,)](source, target, SIZE=8)
        assert target.equal(source * 2)
        assert [one.text() for one in log.launches] == ["double[8]"]
        assert not log.alone


def test_interpret_needs_an_interpreting_triton(monkeypatch):
    monkeypatch.setattr(interpreter, "is_interpreting", lambda: False)
    with pytest.raises(Unavailable, match="TRITON_INTERPRET"), attnlab.interpret():
        pass


def test_a_scalar_condition_of_floats_is_spread_over_a_block(kernels):
    """Triton's interpreter alone makes a float of it, and cannot combine it with a condition."""
    out = torch.zeros(len(NUMBERS), 16)
    assert not run_both(kernels.selects, (len(NUMBERS),), NUMBERS, out, SIZE=16).alone
    expected = torch.full_like(out, 0.5)
    expected[NUMBERS == 5, :3] = 1.0
    assert torch.equal(out, expected)
