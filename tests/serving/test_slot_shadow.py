"""Slots by layer: layers share an array until one writes something else, and compaction changes nothing."""

import numpy as np

from attnlab.serving.slots import SlotShadows

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
