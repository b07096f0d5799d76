"""Hostile cases and their variants: valid, explained, and all in use."""

from attnlab.case.declaration import FIELDS
from attnlab.case.ops import TRITON_OPS
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.variants import LENGTHS, VARIANTS
from attnlab.kernels.model.backend import ModelBackend


def test_every_variant_states_its_reason() -> None:
    reasons = [variant.reason for variant in VARIANTS]
    assert len(set(reasons)) == len(VARIANTS) > 20
    assert all(reason.endswith(".") and reason[0].isupper() for reason in reasons)
    assert all(set(variant.fields) <= set(FIELDS) for variant in VARIANTS)


def test_cases_are_reproducible_and_depend_on_the_seed() -> None:
    subject = ModelBackend(rules="0.33.0")
    for op in TRITON_OPS:
        first, again, other = (
            list(hostile_cases(subject, op, "sm_90", 12, seed)) for seed in (0, 0, 1)
        )
        assert len(first) == 12
        assert first == again
        assert {case.seed for case in first}.isdisjoint(case.seed for case in other)


def test_later_rounds_have_other_lengths() -> None:
    fixed = {lengths for lengths in LENGTHS}
    cases = list(hostile_cases(ModelBackend(rules="0.33.0"), "unified_attention", "sm_90", 60, 0))
    late = cases[len(VARIANTS) :]
    assert any((c.query_lens, c.ctx_lens) not in fixed for c in late)
