"""Power of a test: what it would notice with its data and tolerance, and what would make it."""

import json

import matplotlib.pyplot as plt
import pytest
from helpers.cases import hostile

from attnlab.case.case import Case
from attnlab.defects import CATALOGUE
from attnlab.lab.lab import Lab
from attnlab.mutation.mutants import MUTANTS, NINE
from attnlab.mutation.power import power
from attnlab.mutation.remedies import is_equivalent
from attnlab.show.plots.power import plot_power

NAMED = {mutant.name: mutant for mutant in MUTANTS}
TEST = Case(stage="cast_after_cumsum", x=8)  # the plain test as it draws itself at seed 0
SURVIVORS = {
    "scale_doubled",
    "scale_missing",
    "scores_ignored",
    "causal_plus_one",
    "causal_minus_one",
    "keys_of_next_sequence",
}


def outcomes(case: Case, names: tuple[str, ...]) -> dict[str, str]:
    """Return what a test does with some mutants."""
    told = power(case, mutants=[NAMED[name] for name in names], remedies=False)
    return {mutant.name: mutant.outcome for mutant in told.mutants}


def test_the_test_kills_three_of_nine_with_float16():
    """The seed-size test's own data and tolerance; the survivors are those that a study named."""
    told = outcomes(TEST, (*NINE, "newest_slot_zero", "newest_token_dropped"))
    assert {name for name in NINE if told[name] == "survived"} == SURVIVORS
    assert sum(told[name] == "killed" for name in NINE) == 3
    assert told["newest_slot_zero"] == told["newest_token_dropped"] == "survived"


def test_the_test_kills_one_of_nine_with_fp8_and_accepts_zeros():
    """Its FP8 cache is all zeros: an output of zeros passes, as do keys and values of anybody."""
    case = TEST.replace(kv_cache_dtype="fp8", cache_write="numeric")
    told = outcomes(case, (*NINE, "rows_zero", "noise_of_its_size"))
    assert [name for name in NINE if told[name] == "killed"] == ["random_noise"]
    assert told["rows_zero"] == told["noise_of_its_size"] == "survived"


def test_a_missing_token_is_killed_by_poison_or_a_derived_tolerance():
    """NaN in the empty slot, or an atol from the rounding bound: either would have told."""
    small = TEST.replace(num_heads=8, query_lens=(3, 1), ctx_lens=(20, 929))
    mutants = ("newest_slot_unwritten",)
    assert outcomes(small, mutants) == {"newest_slot_unwritten": "survived"}
    assert outcomes(small.replace(empty_slots="nan"), mutants) == {
        "newest_slot_unwritten": "killed"
    }
    assert outcomes(small.replace(atol=5e-7), mutants) == {"newest_slot_unwritten": "killed"}


@pytest.mark.parametrize(
    "changes", [{}, {"kv_cache_dtype": "fp8", "cache_write": "numeric"}], ids=["fp16", "fp8"]
)
def test_settings_are_found_under_which_all_die_and_the_models_pass(changes):
    """The proposal is run: sound kernels match under it, and every mutant that data can show dies."""
    case = TEST.replace(num_heads=8, query_lens=(40, 33, 1), ctx_lens=(300, 40, 400), **changes)
    told = power(case)
    assert told.survivors
    assert told.left == []
    assert told.models_pass
    assert told.proposal is not None
    assert all(mutant.remedy for mutant in told.survivors)
    proposed = case.replace(**told.proposal)
    assert Lab().run(proposed).status == "match"
    again = power(proposed, remedies=False)
    same = {m.name for m in told.of("equivalent")} | {"tail_leaked"}
    assert {m.name for m in again.survivors} <= same


def test_nothing_dies_at_an_absurd_tolerance_but_what_is_not_finite():
    """atol 100: random noise passes, NaN does not."""
    told = power(hostile(atol=100.0, empty_slots="zeros"), remedies=False)
    assert {m.name for m in told.of("killed")} <= {
        "newest_slot_nan",
        "rows_never_written",
        "folded_on_sequence_0",
        "causal_minus_one",
        "oldest_token_dropped",
        "last_partial_block_dropped",
        "context_only",
        "window_minus_one",
    }
    assert "random_noise" in {m.name for m in told.survivors}


def test_equivalent_is_only_what_no_data_shows():
    """ALiBi shifted is; a doubled scale is not, though ±1e-3 data cannot see it."""
    case = hostile(alibi=True, distribution="uniform_1e-3")
    assert is_equivalent(case, NAMED["alibi_shifted"])
    assert not is_equivalent(case, NAMED["scale_doubled"])
    told = power(case, mutants=[NAMED["alibi_shifted"], NAMED["scale_doubled"]])
    assert {m.name: m.outcome for m in told.mutants} == {
        "alibi_shifted": "equivalent",
        "scale_doubled": "survived",
    }


def test_power_is_json_and_html():
    """Infinity has a name; the counts add up."""
    told = power(hostile(), remedies=False)
    document = json.loads(json.dumps(told.to_dict(), allow_nan=False))
    assert sum(document["counts"].values()) == len(document["mutants"]) > 30
    assert "random_noise" in told._repr_html_()


def test_every_defect_is_a_mutant():
    """The two directions share one catalogue."""
    names = {mutant.name for mutant in MUTANTS}
    assert {defect.name for defect in CATALOGUE if not defect.harmless} <= names
    assert set(NINE) <= names


def test_the_picture_shows_each_margin():
    """One point a mutant at its margin, in its outcome's series; NaN at the right edge."""
    told = power(hostile(empty_slots="zeros"), remedies=False)
    ax = plot_power(told.mutants)
    points = {}
    for line in ax.lines[:3]:
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
            points[told.mutants[int(y)].name] = x
    assert points.keys() == {mutant.name for mutant in told.mutants}
    assert points["newest_slot_nan"] == 1e6
    scale = next(mutant for mutant in told.mutants if mutant.name == "scale_doubled")
    assert points["scale_doubled"] == scale.margin
    assert [text.get_text() for text in ax.get_yticklabels()] == [m.name for m in told.mutants]
    plt.close(ax.figure)
