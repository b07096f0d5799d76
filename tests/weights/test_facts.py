"""Facts of an X-ray: what was measured in one call, without a rule."""

import dataclasses

import pytest
import torch
from helpers import faulty_attention, hooked_attention

import attnlab
from attnlab.case.case import Case
from attnlab.diagnosis.refinement import with_facts
from attnlab.weights import facts as facts_module
from attnlab.weights.facts import MOST_FACTS, weight_facts, weight_traits, without_implied
from attnlab.weights.xray import XRay

FIELDS = {
    "op": "unified_attention",
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 32,
    "block_size": 16,
    "query_lens": (9, 1, 2),
    "ctx_lens": (20, 37, 20),
    "distribution": "normal",
    "platform": "sm_90",
}
HIDDEN = "that must not count"


def measured(name: str, **changes: object) -> XRay:
    """Return the X-ray of a faulty kernel, without a search for rules."""
    module = hooked_attention if hasattr(hooked_attention, name) else faulty_attention
    case = Case(
        **{**FIELDS, "op": getattr(module, name).op, **changes}, backend=f"{module.__file__}:{name}"
    )
    return attnlab.xray(case, confirm=False, limit_s=0.01)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "own_key_of_row_8_lost",
            ["row 8 (sequence 0, token 8) gives no weight to key 28, its own"],
        ),
        (
            "tile_0_lost",
            [
                "rows 0–11 give no weight to keys 0–15; "
                "their weights sum to 0.1072 to 0.8614, where 1 is right",
            ],
        ),
        (
            "tile_0_halved",
            [
                "rows 0–11 give half of their weight to keys up to 15 "
                "and all of their weight to keys from 16 on"
            ],
        ),
        ("halved", ["rows 0–11 give every key half of its weight"]),
        ("zeros_in_row_3", ["row 3 (sequence 0, token 3) gives no weight to any key"]),
        (
            "nan_in_row_3",
            ["row 3 (sequence 0, token 3) has no finite weight, with finite keys and values"],
        ),
        (
            "causal_one_too_many",
            [f"rows 0–7, 10 give a weight to keys {HIDDEN}: later keys (1)"],
        ),
        ("sound", []),
        ("cached_sound", []),
    ],
)
def test_facts_are_the_planted_faults(name, texts):
    assert [one.text for one in weight_facts(measured(name))] == texts


def test_a_head_is_named_if_it_alone_is_wrong():
    (fact,) = weight_facts(measured("head_3_halved"))
    assert fact.text == "rows 0–11, head 3, give every key half of its weight"
    assert (fact.rows, fact.heads) == (tuple(range(12)), (3,))


def test_keys_of_another_sequence_are_counted():
    facts = weight_facts(measured("next_sequence"))
    assert 0 < len(facts) <= MOST_FACTS
    assert all("keys of other sequences" in one.text for one in facts)
    assert {row for one in facts for row in one.rows} == set(range(12))


def test_another_scale_hides_no_keys():
    """Small weights vanish with a larger scale, and the kernel reads these keys all the same."""
    facts = weight_facts(measured("scale_missing", sm_scale=0.1))
    assert [one.kind for one in facts] == ["factors"]


def test_rows_that_share_no_words_are_facts_of_their_own():
    """Each row lacks other keys, and the sum of some weights is wrong, too."""
    found = measured("sound")
    weights = found.weights.clone()
    for row in range(12):
        weights[row, :, found.setup.entry_slot[row, row : row + 2]] = 0.0
        if row % 2:
            weights[row] /= weights[row].sum(-1, keepdim=True)
    changed = dataclasses.replace(found.measurement, weights=weights)
    examined = dataclasses.replace(found.examined, measurement=changed)
    facts = weight_facts(dataclasses.replace(found, examined=examined))
    assert [one.rows for one in facts] == [tuple(range(0, 12, 2)), tuple(range(1, 12, 2))]
    assert facts[0].text.startswith(
        "rows 0, 2, 4, 6, 8, 10 give no weight to 2 of their keys; their"
    )
    assert facts[1].text == "rows 1, 3, 5, 7, 9, 11 give no weight to 2 of their keys"


def test_every_key_without_a_weight_has_none():
    """The facts are compared with the measured weights."""
    found = measured("full_blocks_only")
    facts = weight_facts(found)
    assert [one.kind for one in facts] == ["missing", "missing"]
    for row in range(12):
        ctx_len = int(found.setup.ctx_len[row])
        lost = torch.arange(ctx_len // 16 * 16, ctx_len)
        slots = found.setup.entry_slot[row, lost]
        assert float(found.expected[row][:, slots].max()) > 1e-3
        assert float(found.weights[row][:, slots].abs().max()) == 0


@pytest.fixture
def no_traits(monkeypatch):
    """Let no further case confirm what is wrong with the weights."""
    monkeypatch.setattr(
        "attnlab.diagnosis.diagnose.with_traits", lambda lab, case, diagnosis, kernel: diagnosis
    )


def test_a_diagnosis_states_them_if_nothing_describes_the_fault(no_traits):
    case = Case(**FIELDS, backend=f"{hooked_attention.__file__}:own_key_of_row_8_lost")
    found = attnlab.diagnose(case)
    text = "row 8 (sequence 0, token 8) gives no weight to key 28, its own"
    assert found.status == "unexplained"
    assert found.sentences()[0] == found.conclusion == f"in this call, {text}"
    assert found.sentences()[1].startswith("1 of 12 rows are wrong")
    assert found.to_dict()["observed"] == [text]


def test_wrong_rows_with_right_weights_are_stated(no_traits):
    case = Case(**FIELDS, backend=f"{hooked_attention.__file__}:own_key_of_row_8_lost")
    found = with_facts(attnlab.diagnose(case), torch.tensor([5, 8]))
    words = "the weights of row 5 are right, and the output is wrong"
    assert found.observed[1:] == (words,)


NO_WEIGHT = "keys that must count have no weight"
LESS = "the weights sum to less than is right"
SAME = "every key has the same multiple of its weight"


@pytest.mark.parametrize(
    ("name", "traits", "rows"),
    [
        (
            "own_key_of_row_8_lost",
            {NO_WEIGHT, "the key of the row itself has no weight", "the last keys have no weight"}
            | {"earlier keys weigh too much in comparison with later ones"},
            [8],
        ),
        ("halved", {SAME, LESS}, range(12)),
        (
            "tile_0_halved",
            {"earlier keys weigh too little in comparison with later ones", LESS},
            range(12),
        ),
        ("zeros_in_row_3", {NO_WEIGHT, LESS, "no key has a weight"}, [3]),
        ("nan_in_row_3", {"no weight is finite, with finite keys and values"}, [3]),
        ("sound", set(), []),
    ],
)
def test_traits_are_those_of_the_planted_faults(name, traits, rows):
    found = weight_traits(measured(name).examined)
    assert found is not None
    assert set(found) == traits
    for cells in found.values():
        assert torch.nonzero(cells.all(1)).flatten().tolist() == list(rows)


def test_a_trait_concerns_its_rows_and_heads_alone():
    found = weight_traits(measured("head_3_halved").examined)
    assert found is not None
    assert set(found) == {SAME, LESS}
    assert found[SAME].any(0).tolist() == [False, False, False, True]
    later = weight_traits(measured("causal_one_too_many").examined)
    cells = later["later keys have a weight and must not count"]
    assert torch.nonzero(cells.any(1)).flatten().tolist() == [*range(8), 10]


def test_a_row_that_must_see_no_key_gives_weights_to_others(monkeypatch):
    found, right_keys = measured("halved").examined, facts_module.right_keys
    expected = found.expected.clone()
    expected[0] = 0.0

    def without_row_0(setup):
        return right_keys(setup).index_fill(0, torch.tensor([0]), False)

    monkeypatch.setattr(facts_module, "right_keys", without_row_0)
    traits = weight_traits(dataclasses.replace(found, expected=expected))
    of_row_0 = {text for text, cells in traits.items() if bool(cells[0].all())}
    assert len(of_row_0) == 1
    assert of_row_0.pop().endswith("have a weight and must not count")


def test_thousands_of_wrong_rows_have_no_traits(monkeypatch):
    found = measured("halved").examined
    monkeypatch.setattr(facts_module, "_MOST", 12)
    assert weight_traits(found) is None


def test_what_follows_from_a_trait_is_not_said():
    none = "no key has a weight"
    assert without_implied([NO_WEIGHT, none, LESS]) == [none]
    assert without_implied([NO_WEIGHT, LESS]) == [NO_WEIGHT, LESS]


def test_traits_that_further_cases_have_describe_a_fault():
    found = attnlab.diagnose(
        Case(**FIELDS, backend=f"{hooked_attention.__file__}:own_key_of_row_8_lost")
    )
    assert found.status == "described"
    assert found.conclusion == found.to_dict()["traits"] == found.traits.text
    assert found.conclusion.startswith("of each wrong row: ")
    assert "the key of the row itself has no weight" in found.conclusion
    assert found.traits.cases > 1
