"""Which reads of slots are reported, and which are right."""

import numpy as np
import pytest
from helpers.fake_vllm import BLOCK, Batches, known

from attnlab.serving.batch import ReadArguments, Step
from attnlab.serving.slots import SlotShadows

LAYER = "layers.0.attn"


def write(batches: Batches, step: Step, slots: np.ndarray | None = None) -> list:
    return batches.ownership.wrote(LAYER, step, batches.slots(step) if slots is None else slots)


def read(
    batches: Batches, step: Step, window: int = 0, table: np.ndarray | None = None, reads: str = ""
) -> list:
    arguments = ReadArguments(
        block_table=batches.table(step) if table is None else table,
        seq_lens=step.seq_lens,
        query_lens=step.query_lens,
        block_size=BLOCK,
        sliding_window=window,
    )
    return batches.ownership.read(known(reads=reads), step, arguments)


@pytest.fixture
def batches() -> Batches:
    found = Batches()
    found.request("a", list(range(6)), [3, 7, 2])
    found.request("b", list(range(50, 55)), [5, 1])
    step = found.step(a=(0, 6), b=(0, 5))
    assert write(found, step) == []
    assert read(found, step) == []
    return found


def test_sound_steps_report_nothing(batches):
    for i in range(3):
        step = batches.step(a=(6 + i, 7 + i), b=(5 + i, 6 + i))
        write(batches, step)
        assert read(batches, step) == []


def test_a_row_of_another_request(batches):
    step = batches.step(a=(6, 7), b=(5, 6))
    write(batches, step)
    found = read(batches, step, table=batches.table(step)[[0, 0]])
    assert {one.kind for one in found} == {"other_sequence"}
    assert {(one.request, one.seq) for one in found} == {("b", 1)}
    assert [one.block for one in found] == [3, 7]
    assert found[0].facts["writer"] == "a"
    assert found[0].position == 0


def test_slots_off_by_one(batches):
    step = batches.step(a=(6, 7))
    write(batches, step, batches.slots(step) + 1)
    (found,) = read(batches, step)
    assert (found.kind, found.position, found.facts["written_to"]) == (
        "misplaced",
        6,
        7 * BLOCK + 3,
    )
    step = batches.step(a=(7, 8))
    write(batches, step)
    (found,) = read(batches, step)
    assert (found.kind, found.position) == ("never_written", 6)


def test_a_missing_write(batches):
    (found,) = read(batches, batches.step(a=(6, 7)))
    assert (found.kind, found.position, found.block) == ("never_written", 6, 7)


def test_a_recycled_block(batches):
    batches.requests["b"].is_running = False
    batches.request("c", [9] * 5, [5, 9])
    step = batches.step(c=(0, 5))
    write(batches, step, np.where(batches.slots(step) // BLOCK == 5, -1, batches.slots(step)))
    (found,) = read(batches, step)
    assert (found.kind, found.request, found.block) == ("recycled", "c", 5)
    assert found.facts["writer"] == "b"


def test_a_shared_prefix_is_right_and_other_tokens_are_not(batches):
    """Prefix caching: block 3 has the first four tokens of a."""
    batches.request("same", [0, 1, 2, 3, 8], [3, 9])
    batches.request("other", [0, 1, 2, 9, 8], [3, 10])
    step = batches.step(same=(4, 5), other=(4, 5))
    write(batches, step)
    (found,) = read(batches, step)
    assert (found.request, found.position, found.facts["slots"]) == ("other", 3, 1)


def test_a_window_hides_freed_blocks(batches):
    step = batches.step(a=(6, 7))
    write(batches, step)
    table = batches.table(step)
    table[0, 0] = 0  # vLLM's null block
    assert read(batches, step, window=3, table=table) == []
    assert [one.position for one in read(batches, step, table=table)] == [0]
    assert [one.position for one in read(batches, step, window=4, table=table)] == [3]


def test_a_block_that_another_request_overwrites_is_compared_again(batches):
    """Blocks that were compared are left out only until something writes to them."""
    step = batches.step(a=(6, 7), b=(5, 6))
    slots = batches.slots(step)
    slots[1] = 3 * BLOCK + 1  # b's token over a's position 1
    write(batches, step, slots)
    kinds = {(one.request, one.kind, one.position) for one in read(batches, step)}
    assert ("a", "other_sequence", 1) in kinds


def test_a_slot_outside_the_cache(batches):
    step = batches.step(a=(6, 7))
    (found,) = write(batches, step, np.array([9999]))
    assert (found.kind, found.request, found.facts["slot"]) == ("outside", "a", 9999)
    table = batches.table(step)
    table[0, 1] = 500
    assert {one.kind for one in read(batches, step, table=table)} == {"outside"}


def test_unknown_tokens_are_not_compared(batches):
    batches.request("x", [7, 7, 7, 7, 8], [3, 9]).has_tokens = False
    step = batches.step(x=(4, 5))
    write(batches, step)
    assert read(batches, step) == []


def test_a_resumed_request_may_get_other_blocks(batches):
    batches.requests["a"].is_running = False
    batches.blocks["a"] = [11, 12, 13]
    batches.requests["a"].is_running = True
    step = batches.step(a=(0, 7))
    write(batches, step)
    assert read(batches, step) == []


def test_equal_reads_of_layers_are_compared_once_and_others_again():
    batches = Batches(layers=(LAYER, "layers.1.attn"))
    batches.request("a", list(range(6)), [3, 7])
    step = batches.step(a=(0, 6))
    for layer in (LAYER, "layers.1.attn"):
        batches.ownership.wrote(layer, step, batches.slots(step))
    assert read(batches, step) == []
    assert read(batches, step, reads="layers.1.attn") == []
    wrong = batches.table(step)[:, ::-1].copy()
    assert read(batches, step, table=wrong, reads="layers.1.attn") != []
    assert read(batches, step, reads="layers.1.attn") == []


# Slots by layer: layers share an array until one writes something else, and compaction changes nothing.


LAYERS = ("a", "b", "c")


def shadows() -> SlotShadows:
    found = SlotShadows()
    found.add_group(LAYERS, 32, 4)
    return found


def numbers(found: SlotShadows, layer: str, step: int) -> list[int]:
    return found.of(layer, step).numbers.tolist()


def test_layers_with_equal_writes_share_an_array():
    found = shadows()
    for layer in LAYERS:
        found.write(layer, 0, np.array([1, 2]), np.array([5, 6]))
    assert len(found.shadows) == 1
    assert numbers(found, "c", 0)[:3] == [0, 5, 6]


def test_a_layer_with_other_slots_gets_its_own():
    found = shadows()
    found.write("a", 0, np.array([1, 2]), np.array([5, 6]))
    found.write("b", 0, np.array([2, 3]), np.array([5, 6]))
    assert numbers(found, "a", 0)[:4] == [0, 5, 6, 0]
    assert numbers(found, "b", 0)[:4] == [0, 0, 5, 6]
    assert numbers(found, "c", 0)[:4] == [0, 0, 0, 0]  # it has not written yet
    assert len(found.shadows) == 3


def test_a_layer_that_does_not_write_in_a_step_keeps_what_it_had():
    found = shadows()
    for layer in LAYERS:
        found.write(layer, 0, np.array([1]), np.array([5]))
    for layer in LAYERS[:2]:
        found.write(layer, 1, np.array([1]), np.array([9]))
    found.write("a", 2, np.array([2]), np.array([10]))
    assert numbers(found, "c", 2)[:3] == [0, 5, 0]
    assert numbers(found, "b", 2)[:3] == [0, 9, 0]
    assert numbers(found, "a", 2)[:3] == [0, 9, 10]


def test_random_writes_agree_with_one_array_per_layer():
    """Several writes a step, some left out, some changed, some twice to a slot, with compaction."""
    draw = np.random.default_rng(1)
    found, plain = shadows(), {layer: np.zeros(32, np.int64) for layer in LAYERS}
    content: dict[int, tuple[int, int]] = {}
    for step in range(200):
        for part in range(int(draw.integers(1, 3))):
            count = int(draw.integers(1, 6))
            slots = draw.integers(0, 32, count)
            new = found.table.add(
                np.full(count, 1 + step % 3),
                np.arange(count),
                step,
                np.arange(count).astype(np.uint64),
            )
            content |= {int(n): (step, i) for i, n in enumerate(new)}
            for layer in LAYERS:
                chance = draw.random()
                if chance < 0.05:
                    continue
                own = slots if chance > 0.1 else draw.permutation(32)[:count]
                found.write(layer, step, own, new)
                plain[layer][own] = new
            assert part < 2
        if step % 50 == 49:
            table = found.table
            before = {layer: described(table, found.of(layer, step).numbers) for layer in LAYERS}
            found.compact()
            for layer in LAYERS:
                assert described(found.table, found.of(layer, step).numbers) == before[layer]
                plain[layer] = found.of(layer, step).numbers.copy()
        for layer in LAYERS:
            assert np.array_equal(found.of(layer, step).numbers, plain[layer])
    assert len(found.table) < 32 * 3 + 500


def described(table, held):
    return [(int(table.steps[n]), int(table.positions[n])) for n in held]
