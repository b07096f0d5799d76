"""The session with a runner that is not vLLM's: steps, full graphs, errors, and what is left out."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.fake_vllm import BLOCK, Impl, new_request, runner, scheduled

from attnlab.serving.batch import Request, Requests
from attnlab.serving.capture_state import RecordFile, read_records
from attnlab.serving.settings import CaptureSettings
from attnlab.serving.start import Session

LAYERS = ("layers.0.attn", "layers.1.attn")


class Engine:
    """A runner whose requests are driven by hand."""

    def __init__(self, folder, **parallel):
        class OwnImpl(Impl):
            calls = 0

        self.impl_class = OwnImpl
        self.runner = runner(LAYERS, OwnImpl, **parallel)
        self.session = Session(CaptureSettings(out=str(folder)), RecordFile(folder))
        self.folder = folder

    def step(self, output, positions, table, slots, *, forward, second_runner=False):
        """Run a step of one request, whose layers run in Python if ``forward``."""
        session, ids = self.session, torch.arange(len(positions), dtype=torch.int32)
        session.begin_step(self.runner, (output,), {})
        at = torch.tensor(positions)
        if second_runner:
            session.batch_of_input(SimpleNamespace(req_ids=["a"], input_ids=ids, positions=at))
        else:
            self.runner.input_batch.req_ids = ["a"]
            self.runner.input_ids, self.runner.positions = ids, SimpleNamespace(gpu=at)
            session.batch_of_runner(self.runner)
        common = SimpleNamespace(
            block_table_tensor=torch.tensor([table]),
            seq_lens=torch.tensor([positions[-1] + 1], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            causal=True,
        )
        self.runner.builder.build(0, common)
        if forward:
            for layer in self.runner.layers.values():
                layer.impl.do_kv_cache_update(layer, None, common.slot_mapping)
                assert layer.impl.forward(layer, None, common) == "output"
        session.end_step()

    def lines(self, event):
        self.session.state.tally.write()
        records = read_records(self.folder)
        return [line for lines in records.values() for line in lines if line["event"] == event]


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path)


FIRST = {"scheduled_new_reqs": [new_request("a", [1, 2, 3])]}
SLOTS = [3 * BLOCK, 3 * BLOCK + 1, 3 * BLOCK + 2]


@pytest.mark.parametrize("second_runner", [False, True])
@pytest.mark.parametrize("forward", [True, False])
def test_sound_steps(engine, forward, second_runner):
    how = {"forward": forward, "second_runner": second_runner}
    engine.step(scheduled({"a": 3}, **FIRST), [0, 1, 2], [3], SLOTS, **how)
    engine.step(scheduled({"a": 1}), [3], [3], [3 * BLOCK + 3], **how)
    assert engine.lines("observation") == []
    assert engine.lines("error") == []
    counts = engine.lines("counts")[-1]["counts"]
    assert (counts["steps"], counts["tokens"]) == (2, 4)
    assert counts.get("graph_steps", 0) == (0 if forward else 2)
    assert engine.impl_class.calls == (4 if forward else 0)


@pytest.mark.parametrize("forward", [True, False])
def test_a_wrong_slot_mapping_is_found_with_and_without_graphs(engine, forward):
    engine.step(scheduled({"a": 3}, **FIRST), [0, 1, 2], [3], SLOTS, forward=forward)
    engine.step(scheduled({"a": 1}), [3], [3], [3 * BLOCK + 4], forward=forward)
    found = engine.lines("observation")
    assert [(one["kind"], one["step"], one["request"]) for one in found] == [
        ("misplaced", 1, "a")
    ] * 2
    assert [one["layer"] for one in found] == [*LAYERS]


def test_unknown_ops_are_stated(engine):
    engine.step(scheduled({"a": 3}, **FIRST), [0, 1, 2], [3], SLOTS, forward=True)
    built, op = engine.lines("counts")[-1]["unchecked"]
    assert "OwnImpl.forward" in op
    assert "built before" in built


@pytest.mark.parametrize(
    "parallel", [{"decode_context_parallel_size": 2}, {"enable_dbo": True}], ids=str
)
def test_what_cannot_be_followed_is_stated(tmp_path, parallel):
    engine = Engine(tmp_path, **parallel)
    engine.step(scheduled({"a": 3}, **FIRST), [0, 1, 2], [9], SLOTS, forward=True)
    assert engine.lines("observation") == []
    assert any(text.startswith("slots:") for text in engine.lines("counts")[-1]["unchecked"])


def test_an_error_is_recorded_once_and_the_program_continues(engine, caplog):
    engine.step(scheduled({"a": 3}, **FIRST), [0, 1, 2], [3], SLOTS, forward=True)
    engine.session.slots._ownership.read = None  # not callable
    for i in (3, 4):
        engine.step(scheduled({"a": 1}), [i], [3, 4], [3 * BLOCK + i], forward=True)
    assert engine.impl_class.calls == 6
    (error,) = engine.lines("error")
    assert "TypeError" in error["text"]
    assert len(caplog.records) == 1
    assert engine.lines("counts")[-1]["unchecked"]["slots, after an error in attnlab"] == 1


def test_a_scheduler_of_another_release_stops_nothing(engine, caplog):
    engine.session.begin_step(engine.runner, (object(),), {})
    engine.session.batch_of_runner(engine.runner)
    engine.session.end_step()
    assert engine.session.state.step is None
    assert len(caplog.records) == 1


def test_dummy_steps_and_empty_steps_are_left_out(engine):
    engine.session.begin_step(engine.runner, (scheduled({"a": 3}),), {"dummy_run": True})
    engine.session.end_step()
    engine.session.begin_step(engine.runner, (scheduled({}),), {})
    engine.session.end_step()
    assert engine.session.state.tally.counts["steps"] == 0


def test_other_ranks_do_nothing(tmp_path):
    engine = Engine(tmp_path)
    engine.session.state.settings = CaptureSettings(out=str(tmp_path), rank=(1, 2))
    engine.session.begin_step(engine.runner, (scheduled({"a": 3}),), {})
    engine.session.end_step()
    assert list(tmp_path.iterdir()) == []
    assert not hasattr(engine.impl_class.forward, "is_attnlab")


def test_an_error_of_the_model_leaves_no_call_open(engine):
    def fails(self, layer, query, attn_metadata):
        raise ValueError("out of memory")

    engine.impl_class.forward = fails
    with pytest.raises(ValueError, match="out of memory"):
        engine.step(scheduled({"a": 3}, **FIRST), [0, 1, 2], [3], SLOTS, forward=True)
    assert engine.session.state.call is None


def test_the_record_states_where_it_ran(engine):
    engine.step(scheduled({"a": 3}, **FIRST), [0, 1, 2], [3], SLOTS, forward=False)
    (started,) = engine.lines("started")
    assert (started["rank"], started["layers"], started["cudagraph_mode"]) == (0, 2, "FULL")
    assert json.loads(started["settings"])["out"] == str(engine.folder)


# Prefixes: the same tokens give the same hash, however they arrive.


TOKENS = np.random.default_rng(0).integers(0, 50_000, 300)


def of_tokens(*parts: np.ndarray) -> Request:
    one, first = Request("a", 1), 0
    for part in parts:
        one.set_tokens(first, part)
        first += len(part)
    return one


@pytest.mark.parametrize("cut", [1, 64, 299])
def test_chunks_make_no_difference(cut):
    whole, cut_up = of_tokens(TOKENS), of_tokens(TOKENS[:cut], TOKENS[cut:])
    assert np.array_equal(whole.prefixes, cut_up.prefixes)
    assert len(set(whole.prefixes.tolist())) == len(TOKENS)


def test_a_prefix_depends_on_each_token_before_it_and_on_no_later_one():
    other = TOKENS.copy()
    other[100] += 1
    same = of_tokens(TOKENS).prefixes == of_tokens(other).prefixes
    assert same[:100].all()
    assert not same[100:].any()


def test_the_order_of_tokens_counts():
    swapped = TOKENS.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert of_tokens(TOKENS).prefixes[-1] != of_tokens(swapped).prefixes[-1]


def test_images_with_the_same_placeholders_differ():
    ones = [Request("a", 1), Request("b", 2), Request("c", 3)]
    for one, content in zip(ones, ("cat", "dog", "cat"), strict=True):
        one.mark(10, 20, content)
        one.set_tokens(0, TOKENS)
    cat, dog, again = (one.prefixes for one in ones)
    assert np.array_equal(cat[:10], dog[:10])
    assert cat[10] != dog[10]
    assert np.array_equal(cat, again)


def test_rejected_draft_tokens_are_replaced():
    one = of_tokens(TOKENS[:10], np.array([1, 2, 3]))
    one.set_tokens(10, TOKENS[10:12])
    assert one.length == 12
    assert np.array_equal(one.prefixes, of_tokens(TOKENS[:12]).prefixes)


def test_tokens_of_the_prompt_are_kept():
    one = Request("a", 1)
    one.set_prompt(TOKENS[:10])
    one.set_tokens(8, np.array([0, 0, 7]))  # a runner may have other ids where an image is
    assert one.length == 11
    assert np.array_equal(one.prefixes, of_tokens(TOKENS[:10], np.array([7])).prefixes)


def test_a_gap_makes_the_tokens_unknown():
    one = of_tokens(TOKENS[:10])
    one.set_tokens(12, TOKENS[12:])
    assert not one.has_tokens


def test_requests_follow_the_scheduler():
    requests = Requests()
    requests.update(scheduled({"a": 3}, scheduled_new_reqs=[new_request("a", [1, 2, 3])]))
    first = requests["a"]
    assert (first.is_running, first.prompt_len) == (True, 3)
    requests.update(scheduled({}, preempted_req_ids={"a"}))
    assert not first.is_running
    requests.update(scheduled({"a": 1}))
    assert first.is_running
    requests.update(scheduled({}, finished_req_ids={"a"}))
    assert not first.is_running
    assert "a" not in requests
    requests.update(scheduled({"late": 1}))  # its prompt was never seen
    assert not requests["late"].has_tokens
    assert requests.of_number(first.number) is first
    requests.forget_except([])
    assert first not in list(requests)
