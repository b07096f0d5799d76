"""What a diagnosis says without a name must hold in further cases, or it is not said."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.cases import hostile
from helpers.faulty_labs import FaultyLab
from helpers.tiled_attention import tiled_attention

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.diagnosis.confirmation import with_second_cases
from attnlab.diagnosis.decision import examine
from attnlab.diagnosis.diagnose import diagnose, with_bad_lines
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.output_rules import NO_CONTEXT, wrong_addresses
from attnlab.diagnosis.refinement import confirmed_claim, confirmed_weights
from attnlab.diagnosis.reruns import decodes_alone, further_cases, keeping, second_cases
from attnlab.diagnosis.side_claims import _laws, confirmed_side_claims, side_claims
from attnlab.kernels.backend import RunOptions, RunOutput
from attnlab.kernels.model import ModelBackend
from attnlab.lab.lab import Lab
from attnlab.lab.problem import make_problem
from attnlab.tensors.call import KernelCall
from attnlab.weights.conclude import xray

SMALL = {"num_heads": 4, "head_size": 32, "platform": "sm_90", "empty_slots": "garbage"}
DECODES = hostile(op="unified_attention", query_lens=(1, 1), ctx_lens=(20, 40), **SMALL)
MIXED = hostile(op="unified_attention", query_lens=(1, 5), ctx_lens=(20, 18), **SMALL)


def scaled(call: KernelCall, factor: float) -> dict[str, object]:
    return {"sm_scale": factor * (call.sm_scale or call.query.shape[2] ** -0.5)}


def halved_heads(case: Case, call: KernelCall) -> dict[str, object]:
    """Return the caches in which KV head h holds what head h // 2 must hold."""
    heads = torch.arange(case.num_kv_heads) // 2
    return {name: getattr(call, name)[:, heads] for name in ("key_cache", "value_cache")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledBackend(ModelBackend):
    """The models with ``factor`` times the scale."""

    factor: float = 1.3

    models_prefill = False

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        """Run the models with the changed call, into the same output."""
        wrong = dataclasses.replace(call, **scaled(call, self.factor))
        return super().run(wrong, target, kernels, options)


@pytest.mark.parametrize(("sm_scale", "is_large"), [(16.0, True), (0.3, False), (None, False)])
def test_a_large_scale_is_compared_with_the_default_one(sm_scale, is_large):
    """One key has nearly all weight else, and the sums of all tiles are 1."""
    case = MIXED.replace(sm_scale=sm_scale)
    scales = [one.sm_scale for one in further_cases(case) if one.lengths == case.lengths]
    assert scales == ([None] if is_large else [])
    with keeping(("sm_scale",)):
        assert all(one.sm_scale == sm_scale for one in further_cases(case))


def test_a_name_of_decodes_that_a_prefill_shows_must_hold_in_longer_ones():
    """The scale is doubled in batches of decodes and of short prefills, not in those of long prefills."""
    case = hostile(op="unified_attention", query_lens=(1, 1), ctx_lens=(20, 40), **SMALL)
    is_short = lambda case: max(case.lengths.query_lens) <= 100  # noqa: E731
    lab = FaultyLab(change=lambda case, call: scaled(call, 2.0) if is_short(case) else {})
    alone = diagnose(case, lab.output(case), lab=Lab(), propose=False)
    assert [one.name for one in alone.explanations] == ["scale_doubled"]
    assert not with_second_cases(Lab(), case, lab.output, alone).explanations


def test_scores_that_are_scaled_twice_before_a_soft_cap_have_one_rule():
    """A soft cap bends the scores: two fitted factors would give nearly the same weights."""
    backend = ScaledBackend(factor=0.3)
    seen = xray(MIXED.replace(softcap=2.0, sm_scale=0.3), backend=backend, confirm=False)
    assert [rule.text for rule in seen.description.rules] == [
        "the scores of keys are multiplied by a further sm_scale"
    ]


@pytest.mark.parametrize(
    ("op", "is_of_decodes"),
    [("chunked_prefill_paged_decode", True), ("unified_attention", False)],
)
def test_a_name_that_decodes_alone_show_says_so(op, is_of_decodes):
    """Another kernel of the op computes prefills, so no further case shows what it does."""
    case = hostile(op=op, query_lens=(1, 1), ctx_lens=(20, 40), **SMALL)
    lab = FaultyLab(change=lambda case, call: scaled(call, 2.0))
    alone = diagnose(case, lab.output(case), lab=Lab(), propose=False)
    found = with_second_cases(Lab(), case, lab.output, alone)
    assert found.cause.name == "scale_doubled"
    assert ("(in batches of decodes)" in found.conclusion) == is_of_decodes


def test_a_map_of_heads_must_hold_with_more_than_two_kv_heads():
    """With two of them, head h // 2 is head 0."""
    case, lab = MIXED.replace(num_queries_per_kv=2), FaultyLab(change=halved_heads)
    alone = diagnose(case, lab.output(case), lab=Lab(), propose=False)
    assert alone.cause.name == "kv_head_first"
    assert with_second_cases(Lab(), case, lab.output, alone, second_cases).cause is None


@pytest.mark.parametrize(
    ("feature", "without", "in_all", "expected"),
    [
        ({"softcap": 0.7}, {"softcap": None}, False, ["softcap_ignored"]),
        ({"softcap": 0.7}, {"softcap": None}, True, []),
        ({"sinks": True}, {"sinks": None}, False, []),
    ],
)
def test_another_fault_of_a_further_case_does_not_refute_a_name(feature, without, in_all, expected):
    """Long queries are wrong without the feature, too. If the Case is, too, its name may be a coincidence.

    A name of the sinks may always be one: so does a kernel look that keeps the sum of the last tile alone.
    """

    def spoil(case: Case, call: KernelCall) -> None:
        is_plain = case.softcap is None and not case.sinks
        if max(case.lengths.query_lens) > 40 or (in_all and is_plain):
            call.output[-1] += 1

    case = MIXED.replace(**feature)
    lab = FaultyLab(change=lambda case, call: without, spoil=spoil)
    alone = diagnose(case, lab.output(case), lab=Lab(), propose=False)
    found = with_second_cases(Lab(), case, lab.output, alone, second_cases)
    assert [one.name for one in found.explanations] == expected


def has_prefills(case: Case) -> bool:
    return max(case.lengths.query_lens) > 1


def ones_in_head_1(case: Case, output: torch.Tensor) -> None:
    output[:, 1] = 1.0


def claim_of(case: Case, spoil: Callable[[Case, torch.Tensor], None]) -> str | None:
    """Return the pattern that further cases confirm, in words."""
    lab = FaultyLab(spoil=lambda case, call: spoil(case, call.output))
    first = examine(Lab(), case, lab.output(case), ())
    claim = confirmed_claim(Lab(), case, first, lab.output)
    return None if claim is None else claim.text


@pytest.mark.parametrize("case", [MIXED, DECODES.replace(op="decode_attention_fwd")])
def test_a_pattern_of_all_batches_of_an_op_is_general(case):
    text = claim_of(case, ones_in_head_1) or ""
    assert "in heads 1" in text
    assert "decodes" not in text


def test_a_pattern_that_decodes_show_is_stated_of_decodes():
    """Also if batches with prefills are right, because another kernel may compute them."""

    def spoil(case: Case, output: torch.Tensor) -> None:
        if not has_prefills(case):
            ones_in_head_1(case, output)

    assert "in batches of decodes" in (claim_of(DECODES, spoil) or "")
    assert claim_of(MIXED, spoil) is None


def test_a_pattern_that_one_further_case_contradicts_is_not_stated():
    def spoil(case: Case, output: torch.Tensor) -> None:
        output[:, 1 if case == MIXED else 2] = 1.0

    assert claim_of(MIXED, spoil) is None


def test_a_rule_that_is_left_without_a_limit_must_hold_in_all_cases():
    """A fault beyond 1,200 tokens is not one beyond 1,024; the long sequence is not wrong by its place."""
    fields = {**SMALL, "platform": "gfx942", "query_lens": (1, 1), "ctx_lens": (1363, 20)}
    case = hostile(op="aiter_pa_decode", backend="library:aiter", **fields)

    def spoil(case: Case, call: KernelCall) -> None:
        call.output[torch.tensor(case.lengths.seq_lens) > 1200] = 1.0

    lab = FaultyLab(kernel=lambda _, call: tiled_attention(call), spoil=spoil)
    first = examine(Lab(), case, lab.output(case), ())
    assert confirmed_claim(Lab(), case, first, lab.output) is None


@pytest.mark.parametrize(("limit", "holds"), [(64, True), (97, False)])
def test_a_limit_of_lengths_must_hold_at_the_limit(limit, holds):
    """No case has 97 tokens by chance; the rule "up to 64" is not stated of a fault up to 97."""

    def spoil(case: Case, output: torch.Tensor) -> None:
        short = [seq_len <= limit for seq_len in case.lengths.seq_lens]
        output[: len(short), 1] = torch.where(
            torch.tensor(short)[:, None], 1.0, output[: len(short), 1]
        )

    case = hostile(op="unified_attention", query_lens=(1, 1, 1), ctx_lens=(20, 40, 200), **SMALL)
    text = claim_of(case, spoil) or ""
    assert ("seq_len up to 64" in text) == holds
    assert "seq_len up to 128" not in text


def test_further_cases_have_more_lengths():
    seconds, further = list(second_cases(MIXED)), list(further_cases(MIXED))
    assert further[: len(seconds)] == seconds
    lengths = [set(zip(c.lengths.query_lens, c.lengths.ctx_lens, strict=True)) for c in further]
    assert any((1, 0) in one for one in lengths)
    assert any(query > 1 and not ctx for one in lengths for query, ctx in one)
    # whole tiles: "after the last full tile" is not "the last tile"
    assert any(ctx and ctx % 128 == 0 for one in lengths for _, ctx in one)
    assert any((query + ctx) % 64 == 0 for one in lengths for query, ctx in one)
    assert all(not has_prefills(c) or c.op == MIXED.op for c in further_cases(DECODES))


def with_lines(recurs: Callable[[Case], bool]) -> Diagnosis:
    """Return a diagnosis whose run had a bad access in line 3, which recurs in some cases."""
    lab = FaultyLab(spoil=lambda case, call: ones_in_head_1(case, call.output))
    bad = ("k.py:3 reads 4 bytes before Q",)
    first = examine(Lab(), MIXED, lab.output(MIXED), ()).diagnosis
    first = dataclasses.replace(first, status="unexplained", outside=bad)
    return with_bad_lines(
        Lab(),
        MIXED,
        first,
        lambda case: dataclasses.replace(lab.run(case), outside=bad if recurs(case) else ()),
    )


def test_a_bad_access_describes_a_fault_if_it_recurs():
    found = with_lines(lambda case: True)
    assert (found.status, found.bad_lines) == ("described", ("k.py:3",))
    assert any("k.py:3 has a bad access" in sentence for sentence in found.sentences())


def test_a_bad_access_that_does_not_recur_is_data_without_a_sentence():
    found = with_lines(lambda case: len(case.lengths.query_lens) > 2)
    assert (found.status, found.bad_lines) == ("unexplained", ())
    assert found.to_dict()["outside"] == ["k.py:3 reads 4 bytes before Q"]
    assert not any("k.py:3" in sentence for sentence in found.sentences())


@pytest.mark.parametrize(
    ("again", "is_confirmed"), [(1.3, True), (1.6, False), (1.0, False)], ids=str
)
def test_an_xray_holds_if_further_outputs_follow_from_it(again, is_confirmed):
    factor = {True: 1.3, False: again}
    lab = FaultyLab(change=lambda case, call: scaled(call, factor[case == MIXED]))
    seen = xray(MIXED, backend=ScaledBackend(), limit_s=5, confirm=False)
    found = confirmed_weights(Lab(), MIXED, seen.descriptions, lab.output)
    assert (found is not None) == is_confirmed


def test_the_law_of_a_wrong_log_sum_exp_is_stated():
    """The logarithm of the sum minus the maximum, in place of plus; and the sign alone for random numbers."""
    highest, sums = torch.tensor([0.3, -1.2, 2.0]), torch.tensor([1.4, 3.0, 1.1])
    expected = highest + sums.log()
    bound = torch.full((3,), 1e-5)
    found = list(_laws(sums.log() - highest, expected, highest, bound))
    assert found == ["the logarithm of the sum minus the maximum"]
    random = torch.tensor([0.1, 0.7, 0.3])
    assert list(_laws(expected + random, expected, highest, bound)) == ["too large"]
    assert list(_laws(expected - random, expected, highest, bound)) == ["too small"]
    assert not list(_laws(expected + random - 0.2, expected, highest, bound))
    found = list(_laws(expected + 0.2, expected, highest, bound))
    assert found[0] == "the right one +0.200"


@pytest.mark.parametrize(
    ("of_maximum", "of_sum", "law"),
    [
        (math.log(2), 1, "ln(2) times the maximum plus the logarithm of the sum"),
        (1, 1 / math.log(2), "the maximum plus log2(e) times the logarithm of the sum"),
        (2, 1, "2 times the maximum plus the logarithm of the sum"),
        (1 / math.log(2) ** 2, 1 / math.log(2) ** 2, "log2(e)² times the right one"),
        (1, 0.8, "too small"),
    ],
)
def test_a_log_sum_exp_of_two_bases_is_stated(of_maximum, of_sum, law):
    highest, sums = torch.tensor([0.3, -1.2, 2.0]), torch.tensor([1.4, 3.0, 1.1])
    wrong = of_maximum * highest + of_sum * sums.log()
    assert next(iter(_laws(wrong, highest + sums.log(), highest, torch.full((3,), 1e-5)))) == law


ROUNDED_TO_16_BITS = (
    "the log-sum-exp is right up to rounding to {}, which is more than its dtype explains"
)


@pytest.mark.parametrize(
    ("change", "said", "is_confirmed"),
    [
        (lambda lse: lse.half(), ROUNDED_TO_16_BITS.format("float16"), True),
        (lambda lse: lse.bfloat16(), ROUNDED_TO_16_BITS.format("bfloat16"), True),
        (lambda lse: lse + 2e-4, ROUNDED_TO_16_BITS.format("float16"), True),
        (lambda lse: lse * 1.03 + 0.05 * lse.sin(), "the log-sum-exp is wrong", False),
    ],
    ids=["float16", "bfloat16", "shift", "other"],
)
def test_small_errors_of_a_log_sum_exp_are_stated_by_their_size(change, said, is_confirmed):
    """A shift of 0.0002 was called the right one +0.000, and rounded numbers had no law."""
    lab = Lab()

    def run(case):
        lse = lab.expected_lse(case)[0]
        return dataclasses.replace(lab.run(case), lse=change(lse).float())

    first = side_claims(lab, MERGED, run(MERGED))
    assert [one.said for one in first] == [said]
    expected, bound = lab.expected_lse(MERGED)
    error = (change(expected).double() - expected).abs()
    size = f"off by up to {float(error.max()):.2g} ({float((error / bound).max()):.3g} rounding bounds)"
    assert size in first[0].sentence
    confirmed = confirmed_side_claims(lab, MERGED, first, run)
    assert [one.said for one in confirmed] == ([said] if is_confirmed else [])


@pytest.mark.parametrize(
    ("change", "is_confirmed"),
    [(lambda lse: 0.6 * lse, False), (lambda lse: lse - 0.1 - 0.02 * lse**2, True)],
    ids=["less for long sequences", "always less"],
)
def test_a_log_sum_exp_that_is_too_small_is_so_with_few_keys_too(change, is_confirmed):
    """That of a few keys may be negative: six tenths of it are too large."""
    lab = Lab()
    case = hostile(
        op="decode_attention_fwd", query_lens=(1, 1), ctx_lens=(60, 40), platform="sm_90"
    )

    def run(case):
        return dataclasses.replace(lab.run(case), lse=change(lab.expected_lse(case)[0]).float())

    first = side_claims(lab, case, run(case))
    assert [one.said for one in first] == ["the log-sum-exp is too small"]
    assert bool(confirmed_side_claims(lab, case, first, run)) == is_confirmed


def test_decodes_alone_are_a_case_if_they_need_fewer_kernels():
    mixed = hostile(
        op="chunked_prefill_paged_decode", query_lens=(1, 5), ctx_lens=(20, 18), **SMALL
    )
    (found,) = decodes_alone(mixed)
    assert set(found.lengths.query_lens) == {1}
    assert not list(decodes_alone(found))
    assert not list(decodes_alone(MIXED))  # one kernel computes all


@pytest.mark.parametrize("in_decodes", [1.0, 1.3])
def test_a_description_of_the_weights_says_if_decodes_alone_are_right(in_decodes):
    """A caller may launch the decode kernel otherwise if there is no prefill."""
    mixed = hostile(
        op="chunked_prefill_paged_decode", query_lens=(1, 5), ctx_lens=(20, 18), **SMALL
    )

    def change(case: Case, call: KernelCall) -> dict[str, object]:
        return scaled(call, 1.3 if max(case.lengths.query_lens) > 1 else in_decodes)

    seen = xray(mixed, backend=ScaledBackend(), limit_s=5, confirm=False)
    found = confirmed_weights(Lab(), mixed, seen.descriptions, FaultyLab(change=change).output)
    assert ("(batches of decodes alone are right)" in found.said) == (in_decodes == 1.0)


def test_log_sum_exps_at_wrong_addresses_are_found():
    """All sequences write the place of row 1: the last one stays, the others keep NaN."""
    case = hostile(
        op="decode_attention_fwd", query_lens=(1, 1, 1), ctx_lens=(9, 15, 40), platform="sm_90"
    )
    lab = Lab()
    problem = make_problem(case)
    expected, bound = (one.double() for one in lab.expected_lse(case))
    values = torch.full_like(expected, torch.nan)
    values[1] = expected[2]
    laws = list(wrong_addresses(problem, values, expected, bound))
    assert laws[0] == "written to a wrong address: with stride 0 in place of row × stride 0"
    values[1] = expected[2] + 1
    assert not list(wrong_addresses(problem, values, expected, bound))


MERGED = hostile(
    op="merge_attn_states", query_lens=(2, 1, 3), ctx_lens=(9, 4, 0), platform="sm_90", num_heads=4
)


def test_a_merge_that_reads_a_log_sum_exp_at_a_wrong_address_is_found():
    """Rows without context copy that of head 1, or of their own head plus 1."""
    lab, problem = Lab(), make_problem(MERGED)
    expected, bound = (one.double() for one in lab.expected_lse(MERGED))
    values = expected.clone()
    values[3:] = expected[3:, 1:2]
    laws = list(wrong_addresses(problem, values, expected, bound))
    assert any(NO_CONTEXT in law and "of the suffix are read" in law for law in laws)
    assert not list(wrong_addresses(problem, expected + 1, expected, bound))


def test_log_sum_exps_outside_of_their_memory_have_no_more_precise_address():
    lab, problem = Lab(), make_problem(MERGED)
    expected, bound = (one.double() for one in lab.expected_lse(MERGED))
    values = expected.clone()
    values[3:] = torch.nan
    laws = list(wrong_addresses(problem, values, expected, bound))
    assert "outside of its memory" in laws[0]
    assert NO_CONTEXT in laws[0]


def test_further_cases_of_the_op_of_encoders_have_no_context():
    case = hostile(op="triton_prefill_attention", query_lens=(3, 9), ctx_lens=(0, 0), **SMALL)
    further = [*further_cases(case)]
    assert len(further) > 4
    assert all(set(one.lengths.ctx_lens) == {0} for one in further)
    assert max(max(one.lengths.query_lens) for one in further) > 256
