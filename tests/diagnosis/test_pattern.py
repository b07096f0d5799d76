"""The pattern of an error: plausible wrong outputs, and what is stated about each before any hypothesis."""

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch
from fault_injection import correct_run, plant
from helpers.cases import hostile

from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.defects import DEFECTS
from attnlab.defects.edit import Rows
from attnlab.diagnosis.candidates import cells_of, locate
from attnlab.diagnosis.describe import _added, describe, key_rules
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.pattern import Pattern
from attnlab.kernels import model
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem, RowSlice, all_rows, make_problem, scores_of, weights_of

CASE = hostile(empty_slots="garbage")


@pytest.fixture(scope="module")
def sound() -> tuple[Problem, torch.Tensor]:
    """Return the problem of the hostile case and its correct output."""
    return correct_run(Lab(), CASE)


def pattern_of(sound, change: Callable[[torch.Tensor], torch.Tensor]) -> Pattern:
    """Return the pattern of a changed output."""
    problem, output = sound
    wrong = change(output.clone())
    return describe(problem, wrong, locate(problem, wrong))


def with_values(output: torch.Tensor, index: object, values: object) -> torch.Tensor:
    output[index] = values
    return output


def test_a_correct_output_has_no_pattern(sound):
    assert pattern_of(sound, lambda output: output).facts == ()


ALL_ROWS = slice(None)


def with_a_halved_head(output: torch.Tensor) -> torch.Tensor:
    return with_values(output, (ALL_ROWS, 3), output[:, 3] / 2)


def in_another_layout(output: torch.Tensor) -> torch.Tensor:
    """[num_kv_heads, num_queries_per_kv] written as [num_queries_per_kv, num_kv_heads]."""
    return output.view(-1, 3, 2, 64).transpose(1, 2).reshape(output.shape)


def with_other_elements(output: torch.Tensor) -> torch.Tensor:
    return with_values(output, (..., slice(32, 48)), output[..., 32:48] + 0.1)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (
            lambda output: with_values(output, 20, 0),
            {
                "zeros": {"rows": [20]},
                "sequences": {"sequences": [2]},
                "heads": {"heads": list(range(6))},
            },
        ),
        (
            with_a_halved_head,
            {
                "factor": {
                    "heads": [3],
                    "value": pytest.approx(0.5, rel=1e-3),
                    "rows": list(range(98)),
                },
                "heads": {"heads": [3]},
            },
        ),
        (lambda output: output[:, [0, 4, 2, 3, 1, 5]], {"heads_moved": {"from": {"1": 4, "4": 1}}}),
        (in_another_layout, {"heads_moved": {"from": {"1": 2, "2": 4, "3": 1, "4": 3}}}),
        (
            lambda output: with_values(output, 20, output[19].clone()),
            {"rows_moved": {"from": {"20": 19}}},
        ),
        (lambda output: output.transpose(1, 2).reshape(output.shape), {"transposed": {}}),
        (lambda output: output.roll(32, -1), {"reordered": {}}),
        (lambda output: output + 0.01, {"added": {"value": pytest.approx(0.01, rel=0.01)}}),
        (
            lambda output: with_values(output, (ALL_ROWS, 2), torch.nan),
            {"nonfinite": {"heads": [2]}},
        ),
        (with_other_elements, {"elements": {"elements": list(range(32, 48))}}),
    ],
    ids=[
        "zeros",
        "half",
        "heads exchanged",
        "another layout",
        "the row before",
        "heads and elements",
        "halves of heads",
        "constant",
        "nan",
        "elements",
    ],
)
def test_a_change_of_the_output_is_described(sound, change, facts):
    pattern = pattern_of(sound, change)
    for kind, values in facts.items():
        (fact,) = pattern.of(kind)
        assert {name: fact.values[name] for name in values} == values
    assert pattern.is_complete == ("elements" not in facts)  # which are a place, no rule
    assert json.dumps(pattern.to_dict(), allow_nan=False)


def test_noise_in_one_sequence_has_a_place_and_no_rule(sound):
    noise = torch.randn(17, 6, 64, generator=torch.Generator().manual_seed(1)).half()
    pattern = pattern_of(sound, lambda output: with_values(output, slice(32, 49), noise))
    assert pattern.of("sequences")[0].values["sequences"] == [4]
    assert pattern.of("rows")[0].values["rows"] == list(range(32, 49))
    assert pattern.rules == []
    assert pattern.of("precision") == []


def test_rows_shifted_by_one(sound):
    pattern = pattern_of(sound, lambda output: output.roll(1, 0))
    (moved,) = pattern.of("rows_moved")
    assert moved.values["from"]["20"] == 19
    assert "row r - 1" in moved.what
    assert pattern.is_complete


def test_numbers_rounded_to_bfloat16(sound):
    pattern = pattern_of(sound, lambda output: output.bfloat16().half())
    assert pattern.of("format")[0].values["format"] == "bfloat16"
    (size,) = pattern.of("precision")
    assert size.what.endswith("they are small, in 6 of 12 sequences")
    assert not pattern.is_complete


def test_a_head_of_nearly_equal_elements_contradicts_no_added_number(sound):
    """They differ by less than half a step of float16 near 1."""
    problem, output = sound
    heads = output.flatten(0, 1).double()
    correct = torch.cat([heads[:1] * 1e-4, heads[1:]])
    added = torch.linspace(0.3, 1.0, len(correct), dtype=torch.float64)[:, None].flip(0)
    wrong = correct + added
    some = cells_of(problem, output, torch.zeros(output.shape[:2]))
    cells = dataclasses.replace(
        some, output=wrong, correct=correct, bound=torch.full_like(correct, 1e-6)
    )
    ((fact, mask),) = _added(cells, torch.ones(len(correct), dtype=torch.bool))
    assert "one number is added to all elements" in fact.what
    assert bool(mask.all())


def test_wrong_rows_are_listed_without_a_rule(sound):
    """Sequence 6 has 40 new tokens; its rows from token 16 on are halved. Other calls may have other rows."""
    start = sound[0].row_starts()[6]
    rows = slice(start + 16, start + 40)
    pattern = pattern_of(sound, lambda output: with_values(output, rows, output[rows] / 2))
    assert pattern.of("rows")[0].values["rows"] == list(range(rows.start, rows.stop))
    assert not any("token 16" in sentence for sentence in pattern.sentences())


def test_wrong_sequences_are_listed_without_a_rule(sound):
    """The wrong sequences are those with one new token, which one call does not show."""
    problem, starts = sound[0], sound[0].row_starts()
    decodes = [seq for seq in range(problem.num_seqs) if problem.query_len(seq) == 1]
    rows = [starts[seq] for seq in decodes]
    pattern = pattern_of(sound, lambda output: with_values(output, rows, output[rows] / 2))
    (places,) = pattern.of("sequences")
    assert places.values["sequences"] == decodes
    assert "exactly" not in places.sentence
    assert "new token" not in places.sentence


@pytest.mark.parametrize("scale", [0.0156, 0.3, -0.125, 0.0])
def test_a_scale_that_fits(sound, scale):
    """A model runs with another scale; no defect of the catalogue has it."""
    problem, _ = sound
    call = dataclasses.replace(problem.call, output=sound[1].clone(), sm_scale=scale or 1e-9)
    model.run(call, Target.of(CASE), decide(CASE).kernels)
    pattern = describe(problem, call.output, locate(problem, call.output))
    (fact,) = pattern.of("softmax_scale")
    assert fact.values["scale"] == pytest.approx(scale, rel=5e-3)
    assert pattern.is_complete


@pytest.mark.parametrize(
    ("name", "keys", "multiplier"),
    [
        ("last_partial_block_dropped", "the cached keys after the last full block of 16", 0),
        ("first_partition_dropped", "the keys at positions 0–255 (partition 0 of 256)", 0),
        ("newest_token_dropped", "the newest keys of the sequences", 0),
        ("causal_minus_one", "the keys of the rows' own tokens", 0),
        ("causal_plus_one", "the keys right after the rows' own tokens", 1),
        ("context_only", "the keys of the new tokens", 0),
    ],
)
def test_missing_and_extra_keys(sound, name, keys, multiplier):
    """The rule is found without the catalogue, also if other rows are NaN because they see no key."""
    problem, output = sound
    wrong = plant(problem, output, DEFECTS[name], "all")
    pattern = describe(problem, wrong, locate(problem, wrong))
    (fact,) = pattern.of("keys")
    assert fact.values["keys"] == keys
    assert fact.values["multiplier"] == pytest.approx(multiplier, abs=0.05)
    assert pattern.is_complete


def test_a_missing_rescale_shows_as_factors(sound):
    problem, output = sound
    wrong = plant(problem, output, DEFECTS["partitions_not_rescaled"], "all")
    (fact,) = describe(problem, wrong, locate(problem, wrong)).of("keys")
    assert fact.values["high"] > 2 * fact.values["low"]


def test_keys_of_another_head_have_no_rule(sound):
    """The counterpart: a fault that no rule describes is not described."""
    problem, output = sound
    for name in ("kv_head_next", "table_row_next"):
        wrong = plant(problem, output, DEFECTS[name], "all")
        assert describe(problem, wrong, locate(problem, wrong)).rules == []


def test_a_large_output_is_sampled():
    """More elements than are examined; the rule is still found."""
    case = hostile(query_lens=(300, 300, 1), ctx_lens=(40, 3, 300), num_heads=12)
    problem, output = correct_run(Lab(), case)
    output[:, 5] /= 2
    pattern = describe(problem, output, locate(problem, output))
    assert pattern.of("factor")[0].values["heads"] == [5]
    assert pattern.is_complete


def test_a_diagnosis_states_the_description_first(sound):
    """No defect halves a head: the status is "described", and the cause stays empty."""
    output = sound[1].clone()
    output[:, 3] /= 2
    diagnosis = diagnose(CASE, output)
    assert (diagnosis.status, diagnosis.cause) == ("described", None)
    assert diagnosis.to_dict()["pattern"]["complete"] is True
    assert diagnosis.sentences()[0] == "head 3: half of the correct output"
    assert len(diagnosis._repr_html_()) < 20_000


@pytest.mark.parametrize(
    ("hidden", "keys"),
    [
        (lambda keys: keys == 7, "the keys at position 7"),
        (lambda keys: keys % 16 == 15, "the keys in slot 15 of every block of 16"),
    ],
)
def test_keys_that_every_row_misses(sound, hidden, keys):
    """No defect of the catalogue hides them."""
    problem, output = sound
    wrong = output.clone()
    for row_slice in all_rows(problem):
        inputs = problem.attention_inputs(row_slice)
        visible = inputs.visible & ~hidden(torch.arange(inputs.key.shape[0]))
        rows = problem.predict(dataclasses.replace(inputs, visible=visible)).output
        sees_all = (visible == inputs.visible).all(1)[:, None, None]
        at = problem.rows(row_slice)
        wrong[at] = torch.where(sees_all, output[at], rows.to(output.dtype))
    (fact,) = describe(problem, wrong, locate(problem, wrong)).of("keys")
    assert fact.values["keys"] == keys
    assert fact.what.endswith("are missing")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_coarse_rounding_gets_no_rule(sound, dtype):
    """Weights and values in a shorter format: the errors are rounding, whatever rule would fit them."""
    problem, output = sound
    wrong = output.clone()
    for row_slice in all_rows(problem):
        inputs = problem.attention_inputs(row_slice)
        weights = weights_of(inputs, scores_of(inputs)).to(dtype).double()
        rounded = weights @ inputs.value.to(dtype).double().transpose(0, 1)
        wrong[problem.rows(row_slice)] = rounded.transpose(0, 1).to(output.dtype)
    pattern = describe(problem, wrong, locate(problem, wrong))
    assert pattern.wrong_cells > 0
    assert pattern.rules == []


@pytest.mark.parametrize(
    ("op", "whose"), [("context_attention_fwd", " of the context"), ("unified_attention", "")]
)
def test_the_last_tile_is_one_of_the_keys_that_it_divides(op, whose):
    """With new tokens from the arguments, tiles of the cache hold the context alone."""
    problem = make_problem(hostile(op=op, platform="sm_90", query_lens=(4, 3), ctx_lens=(70, 9)))
    rules = {rule.text: rule for rule in key_rules(problem)}
    rows = RowSlice(seq=0, tokens=torch.arange(4), heads=torch.arange(1))
    at = Rows(problem=problem, slice=rows)
    last = rules[f"the keys of the last tile of 64{whose}"].members(at)
    others = rules[f"all keys but those of the last tile of 64{whose}"]
    assert torch.equal(last, torch.arange(74) // 64 == 1) == (not whose)
    assert torch.equal(others.members(at), ~last)
