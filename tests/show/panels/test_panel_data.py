"""PanelData and Selection: values, places in the cache, and the use of slots."""

from dataclasses import replace

import pytest
from helpers.cases import hostile
from helpers.panels import SMALL, ignore_step

from attnlab.case.ops import WRITE
from attnlab.case.stages import STAGES
from attnlab.contracts.contract import Target, contracts_of
from attnlab.contracts.slot_states import SlotState, slot_map
from attnlab.lab.lab import Lab
from attnlab.show.panels import panel
from attnlab.show.panels.texts import make_panel_data, select, select_band
from attnlab.show.plots.errors import BAND


def test_a_selection_agrees_with_the_error_map() -> None:
    lab, case = Lab(), hostile(fill="context_only", empty_slots="garbage", output_init="zeros")
    data = make_panel_data(lab, case, ignore_step)
    errors, provenance = data.result.errors, data.result.cache.provenance
    assert errors is not None
    expected, output = lab.reference(case), data.result.call.output
    for row in range(case.lengths.num_tokens):
        head = row % case.num_heads
        one = select(data, row, head)
        seq, token = case.lengths.locate(row)
        position = case.lengths.ctx_lens[seq] + token
        assert (one.seq, one.token) == (seq, token)
        assert (one.place.block, one.place.slot) == provenance.slot(seq, position)
        assert one.place.owner == (seq, position)
        assert one.expected == float(expected[row, head, one.element])
        assert one.got == float(output[row, head, one.element])
        assert abs(one.got - one.expected) == pytest.approx(one.error, rel=1e-6)


def test_the_worst_row_of_a_band_is_selected() -> None:
    """NaN counts as the worst."""
    data = make_panel_data(Lab(), SMALL, ignore_step)
    errors = data.result.errors
    rows = errors.band_rows(2 * BAND + 3)  # sequence 2 has 40 tokens
    assert len(rows) > 1
    errors.error[rows.stop - 1, 2] = float("nan")
    assert select_band(data, 2 * BAND + 3, 2).row == rows.stop - 1


def test_a_selection_of_a_cache_write_is_a_slot() -> None:
    case = SMALL.replace(op=WRITE, x=None, num_blocks=40)
    view = panel(case, knobs=("stage",), views=("error", "slots"))
    assert view.wait(30)
    assert view.error is None
    slots = view.data.row_slots
    for row in (0, 30, 95, len(slots) - 1):
        one = select(view.data, row, 1)
        assert one.place.block * 16 + one.place.slot == int(slots[row])
    view.pointer.select(2, 7, 0)
    assert view.selection.place.owner == (2, 7)


@pytest.mark.parametrize("stage", STAGES)
def test_slots_by_writer_and_reader(stage: str) -> None:
    """The expected counts follow from the lengths alone."""
    data = make_panel_data(Lab(), SMALL.replace(stage=stage), ignore_step)
    lengths, fill = SMALL.lengths, data.result.case.staging.fill
    read = written = own = 0
    for query_len, ctx_len in zip(lengths.query_lens, lengths.ctx_lens, strict=True):
        reads = ctx_len + (query_len == 1)
        writes = {
            "context_only": ctx_len,
            "decode_rows": ctx_len + (query_len == 1),
            "all_rows": ctx_len + query_len,
        }[fill]
        read, written, own = read + reads, written + writes, own + min(reads, writes)
    expected = {SlotState.OWN: own, SlotState.UNWRITTEN: read - own}
    assert data.slot_map.counts() == {state: count for state, count in expected.items() if count}
    is_written = data.slot_map.provenance.seq >= 0
    assert int((is_written & ~data.slot_map.is_read).sum()) == written - own


def test_a_foreign_slot_is_recognized() -> None:
    """The call's block table names a block of another sequence."""
    data = make_panel_data(Lab(), SMALL, ignore_step)
    table = data.result.call.block_table.clone()
    table[0, 0] = table[1, 0]
    call = replace(data.result.call, block_table=table)
    provenance = data.result.cache.provenance
    kernels = data.result.decision.kernels
    contracts = contracts_of(kernels[:1], Target.of(SMALL), call.op)  # the prefill kernel alone
    slots = slot_map(call, contracts, provenance)
    assert slots.counts()[SlotState.OTHER_SEQUENCE] == 16
    block = int(provenance.block_table[1, 0])
    slot = slots.at(block, 3)
    assert (slot.writer, slot.reader, slot.owner) == ((1, 3), (0, 3), (1, 3))


def test_blocks_are_in_the_order_of_the_block_table() -> None:
    """Blocks that no sequence uses are last."""
    data = make_panel_data(Lab(), SMALL.replace(num_blocks=30), ignore_step)
    order = data.slot_map.order().tolist()
    table = data.result.cache.provenance.block_table.flatten().tolist()
    assert order[: len(table)] == table
    assert sorted(order) == list(range(30))
