"""Rules beyond the catalogue: wrong addresses, found from an output and confirmed on further cases."""

import math
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from helpers.cases import hostile
from helpers.faulty_labs import FaultyLab

from attnlab.case.case import Case
from attnlab.case.errors import KernelFailed
from attnlab.contracts.contract import Target
from attnlab.diagnosis import confirmation
from attnlab.diagnosis.address_rules import address_defects
from attnlab.diagnosis.confirmation import find_rule
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.output_rules import (
    DECODES,
    MERGE_LAWS,
    NO_CONTEXT,
    highest_of_parts,
    output_defects,
    rows_of,
    wrong_addresses,
)
from attnlab.diagnosis.reruns import further_cases
from attnlab.kernels.model import partials
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem, all_rows, make_problem, scores_of
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_output, strided

Change = Callable[[KernelCall], dict[str, object]]


def reads_wrong(change: Change) -> FaultyLab:
    return FaultyLab(change=lambda case, call: change(call))


def writes_all_to_row_0(case: Case, call: KernelCall) -> None:
    call.output[0] = call.output[-1]
    call.output[1:] = make_output(case)[1:]


def writes_heads_at_the_stride_of_rows(case: Case, call: KernelCall) -> None:
    """Write the output with the number of rows as the stride of a head."""
    rows, heads, size = call.output.shape
    written = make_output(case).flatten()
    for row in range(rows):
        for head in range(heads):  # the last one wins
            to = row * heads * size + head * rows
            room = written[to : to + size]
            room.copy_(call.output[row, head][: len(room)])
    call.output.copy_(written.view(rows, heads, size))


def queries_of_kv_heads(call: KernelCall) -> dict[str, object]:
    heads = torch.arange(call.query.shape[1]) // call.num_queries_per_kv
    return {"query": call.query[:, heads].clone()}


def offset_as_position(call: KernelCall) -> dict[str, object]:
    """The values of each slot are read one element of the block later, in the memory of the cache."""
    flat = call.value_cache.flatten()
    moved = torch.cat([flat[call.block_size :], flat.new_zeros(call.block_size)])
    return {"value_cache": moved.view(call.value_cache.shape)}


def values_of_pairs(call: KernelCall) -> dict[str, object]:
    """KV head h reads the values of KV head h // 2."""
    heads = torch.arange(call.key.shape[1]) // 2
    return {"value_cache": call.value_cache.index_select(1, heads)}


def values_by_group(call: KernelCall) -> dict[str, object]:
    """KV head h reads the values of KV head h // num_queries_per_kv, which is h // 2 in groups of 2."""
    heads = torch.arange(call.key.shape[1]) // call.num_queries_per_kv
    return {"value_cache": call.value_cache.index_select(1, heads)}


def as_strided(name: str, strides: Callable[[torch.Tensor], tuple[int, ...]]) -> Change:
    """Return the change in which a tensor is read with other strides from where it begins."""

    def change(call: KernelCall) -> dict[str, object]:
        one = getattr(strided(call), name)
        first = one.storage_offset()
        flat = torch.zeros(2 * one.untyped_storage().nbytes(), dtype=one.dtype)
        memory = one.as_strided((one.untyped_storage().nbytes() // one.element_size(),), (1,), 0)
        flat[: len(memory) - first] = memory[first:]
        return {name: flat.as_strided(one.shape, strides(one)), "strides": "contiguous"}

    return change


def exchanged(one: torch.Tensor) -> tuple[int, ...]:
    """Return the strides with those of the dimension and of the slot exchanged."""
    return (*one.stride()[:2], one.stride(3), one.stride(2))


@pytest.mark.parametrize(
    ("op", "change", "text"),
    [
        (
            "unified_attention",
            as_strided("query", lambda one: (one.shape[1:].numel(), one.shape[2], 1)),
            "queries are read at a wrong address: with row × contiguous stride 0 in place of",
        ),
        (
            "chunked_prefill_paged_decode",
            as_strided("value_cache", exchanged),
            "cached values are read at a wrong address: stride 2 and stride 3 are exchanged",
        ),
    ],
    ids=["contiguous", "exchanged"],
)
@pytest.mark.quick("exchanged")
def test_a_read_with_other_strides_is_described(op, change, text):
    case = hostile(
        op=op, platform="sm_90", empty_slots="garbage", kv_layout="fused", num_heads=4,
        query_lens=(1, 1, 1), ctx_lens=(9, 15, 40),
    )  # fmt: skip
    assert text in find_rule(Lab(), case, reads_wrong(change).output).text


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (queries_of_kv_heads, ("queries", "(KV head) × stride 1", "head × stride 1")),
        (values_of_pairs, ("cached values", "(KV head // 2) × stride")),
        (values_by_group, ("cached values", "(KV head // num_queries_per_kv) × stride")),
    ],
)
@pytest.mark.quick("queries_of_kv_heads-parts0")
def test_a_wrong_read_is_described_by_its_address(change, parts):
    case = hostile(op="unified_attention", platform="sm_90", empty_slots="garbage")
    diagnosis = diagnose(case, lab=reads_wrong(change))
    assert diagnosis.status == "described"
    assert diagnosis.rule.cases > 2
    assert not diagnosis.rule.only_decodes
    assert all(part in diagnosis.rule.text for part in parts)


def test_rows_written_to_one_row_are_described_by_the_missing_term():
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(1, 1, 1), ctx_lens=(9, 15, 40)
    )
    lab, recycled = FaultyLab(spoil=writes_all_to_row_0), case.replace(output_init="recycled")
    diagnosis = diagnose(case, lab=lab)
    assert "the term row × stride 0 is missing" in diagnosis.rule.text
    # Each sequence has one row, so sequences that are written to sequence 0 give the same output.
    captured = diagnose(recycled, lab.output(recycled), lab=Lab(), propose=False)
    assert "folded_on_sequence_0" in [one.name for one in captured.explanations]
    assert diagnosis.explanations == []


def test_rows_written_with_the_stride_of_another_tensor():
    """A log-sum-exp [heads, rows] has the number of rows as its stride of heads."""
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(1, 3, 1), ctx_lens=(9, 15, 40)
    )
    diagnosis = diagnose(case, lab=FaultyLab(spoil=writes_heads_at_the_stride_of_rows))
    assert "with head × prefix_lse stride 0 in place of head × stride 1" in diagnosis.rule.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("the weights are not divided by their sum", (1.0, 0.25)),
        ("the prefix is not divided by the sum", (1.0, 0.2)),
        ("the suffix is divided by the sum twice", (0.8, 0.16)),
        ("the weights are divided by their sum twice", (0.64, 0.16)),
    ],
)
def test_the_parts_of_a_merge_are_divided_by_the_sum(name, expected):
    """The weights before the division are 1 and 1/4."""
    lse = torch.tensor([2.0, 2.0 - math.log(4)], dtype=torch.float64)[:, None, None, None]
    assert MERGE_LAWS[name](lse).flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in MERGE_LAWS if "weight 1" in name])
def test_a_part_with_weight_1_may_be_empty(name):
    """The log-sum-exp of an empty part is -inf; its output is 0."""
    lse = torch.tensor([[0.5, -torch.inf], [1.5, 2.0]])[:, :, None, None]
    found = MERGE_LAWS[name](lse).squeeze()
    assert found[0 if "prefix" in name else 1].tolist() == [1.0, 1.0]
    assert found.isfinite().all()


def test_an_exponent_of_a_merge_is_halved():
    """The larger part, the suffix, keeps the weight 1 before the division."""
    lse = torch.tensor([1.0, 3.0], dtype=torch.float64)[:, None, None, None]
    found = MERGE_LAWS["the exponent of the weight of the prefix is halved"](lse).flatten()
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.0]).double().softmax(0))


def as_heads_first(output: torch.Tensor) -> torch.Tensor:
    """Return what a kernel reads from [rows, heads, size] if it takes it for [heads, rows, size]."""
    rows, heads, size = output.shape
    return output.reshape(heads, rows, size).transpose(0, 1)


def merges(
    exponents: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]] = lambda p, s: [p, s],
    transposes: bool = False,
    prefix_as: Callable[[torch.Tensor], torch.Tensor] = lambda output: output,
    rest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> FaultyLab:
    """Return a lab whose merge has the weights of ``exponents``, of both log-sum-exps.

    It reads the log-sum-exp of the suffix as [rows, heads] if ``transposes``, and the output of the prefix as
    ``prefix_as`` views it. ``rest``: returns the weight of the suffix from that of the prefix before and
    after its division.
    """

    def kernel(case: Case, call: KernelCall) -> None:
        parts = partials(call, Target.of(case))
        prefix, suffix = parts.prefix_lse.double(), parts.suffix_lse.double()
        if transposes:
            suffix = suffix.flatten().view(suffix.shape[::-1]).T
        weights = torch.stack(exponents(prefix, suffix)).softmax(0).transpose(1, 2)[..., None]
        if rest is not None:
            before = (prefix - torch.maximum(prefix, suffix)).exp().T[..., None]
            weights = torch.stack([weights[0], rest(before, weights[0])])
        outputs = prefix_as(parts.prefix_output.double()), parts.suffix_output.double()
        call.output[:] = weights[0] * outputs[0] + weights[1] * outputs[1]

    return FaultyLab(kernel=kernel)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (
            {"exponents": lambda p, s: [p - s, s - torch.maximum(p, s)]},
            "the log-sum-exp of the suffix is subtracted in the weight of the prefix",
        ),
        (
            {"exponents": lambda p, s: [p - torch.maximum(p, s), s - p]},
            "the log-sum-exp of the prefix is subtracted in the weight of the suffix",
        ),
        ({"transposes": True}, "log-sum-exps of the suffix are read at a wrong address: as [rows"),
        (
            {"prefix_as": as_heads_first},
            "outputs of the prefix are read at a wrong address: as [heads",
        ),
        ({"prefix_as": lambda output: output.flip(1)}, None),
        (
            {"rest": lambda before, after: 1 - before},
            "the suffix has the rest of the prefix's weight",
        ),
        ({"rest": lambda before, after: 1 - before * after}, None),
        ({}, None),
    ],
    ids=[
        "prefix",
        "suffix",
        "transposed",
        "heads first",
        "heads flipped",
        "rest",
        "other rest",
        "none",
    ],
)
@pytest.mark.quick("prefix", "transposed", "other rest", "none")
def test_parts_of_a_merge_are_exchanged_transposed_or_weighted_wrongly(faults, text):
    """Other faults get no rule, a merge without a fault nothing."""
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(6, 3), ctx_lens=(1, 40), num_heads=4
    )
    diagnosis = diagnose(case, lab=merges(**faults))
    if text is None:
        assert (diagnosis.status == "nothing wrong") == (not faults)
        assert diagnosis.rule is None
        return
    assert text in diagnosis.rule.text
    assert diagnosis.rule.cases > 2


@pytest.mark.parametrize("op", ["merge_attn_states", "decode_attention_fwd"])
def test_a_log_sum_exp_is_stored_with_its_dimensions_exchanged(op):
    """merge_attn_states stores [heads, rows], decode_attention_fwd [rows, heads]."""
    lens = {"query_lens": (1, 1, 1), "ctx_lens": (9, 15, 40), "num_heads": 4}
    case, lab = hostile(op=op, platform="sm_90", **lens), Lab()
    problem = Problem.of_case(case, lab.batch(case), lab.call(case))
    expected, bound = (one.double() for one in lab.expected_lse(case))
    own = ["heads", "rows"] if op == "merge_attn_states" else ["rows", "heads"]
    stored = expected if own[0] == "heads" else expected.T.contiguous()
    values = stored.flatten().view(stored.shape[::-1]).T
    values = values if own[0] == "heads" else values.T.contiguous()
    text = f"as [{own[1]}, {own[0]}] in place of [{own[0]}, {own[1]}]"
    assert any(text in law for law in wrong_addresses(problem, values, expected, bound))
    assert not any(
        text in law for law in wrong_addresses(problem, expected.flip(1), expected, bound)
    )


def test_the_highest_part_of_a_decode_is_that_of_its_splits():
    lens = {"query_lens": (1, 1), "ctx_lens": (9, 40), "num_heads": 4, "sm_scale": 0.5}
    problem = make_problem(hostile(op="decode_attention_fwd", platform="sm_90", **lens))
    for row_slice, found in zip(all_rows(problem), highest_of_parts(problem), strict=True):
        scores = scores_of(problem.attention_inputs(row_slice))[:, 0]
        parts = scores.split(-(-scores.shape[1] // 4), 1)  # 4 splits
        highest = torch.stack([part.logsumexp(1) for part in parts]).amax(0)
        torch.testing.assert_close(found, highest.double())


def stores_interleaved(case: Case, call: KernelCall) -> None:
    """Store the heads of each KV head num_kv_heads apart."""
    group = call.num_queries_per_kv
    right, heads = call.output.clone(), torch.arange(call.query.shape[1])
    call.output[:, heads % group * call.key.shape[1] + heads // group] = right


def test_heads_of_the_output_are_interleaved():
    case = hostile(op="unified_attention", platform="sm_90", num_heads=6, num_queries_per_kv=3)
    diagnosis = diagnose(case, lab=FaultyLab(spoil=stores_interleaved), limit=None, propose=False)
    assert "(head % num_queries_per_kv * num_kv_heads" in diagnosis.rule.text


def adds_weights(case: Case, call: KernelCall) -> None:
    """Merge with the weight of the suffix in place of its weighted output."""
    parts = partials(call, Target.of(case))
    lse = torch.stack([parts.prefix_lse, parts.suffix_lse]).double()
    weights = lse.softmax(0).transpose(1, 2)[..., None]
    call.output[:] = weights[0] * parts.prefix_output.double() + weights[1]


def test_a_weight_that_is_added_in_place_of_a_weighted_output():
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(1, 3), ctx_lens=(9, 40), num_heads=4
    )
    diagnosis = diagnose(case, lab=FaultyLab(kernel=adds_weights))
    assert "the weight of the suffix is added" in diagnosis.rule.text
    assert diagnosis.rule.cases > 2


def copies_from_the_first(case: Case, call: KernelCall) -> None:
    """Copy the last rows, those without context, from rows that are counted from the first of them."""
    rows = rows_of(make_problem(case), NO_CONTEXT).nonzero().flatten()
    suffix = partials(call, Target.of(case)).suffix_output
    call.output[rows] = suffix[rows - rows[:1]].to(call.output.dtype)


def test_the_token_of_a_sequence_is_not_taken_for_the_row_after_the_last_context():
    """In the last sequence alone, both are the same."""
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(1, 3, 3), ctx_lens=(20, 37, 0)
    )
    lab = FaultyLab(spoil=copies_from_the_first)
    assert lab.run(case).status == "mismatch"
    assert find_rule(lab, case, lab.output) is None


def test_a_fault_that_no_rule_predicts_gets_none():
    """Values one element of memory later: no term of the address is changed, one is added."""
    case = hostile(op="context_attention_fwd", platform="sm_90", empty_slots="garbage")
    lab = reads_wrong(offset_as_position)
    assert lab.run(case).status == "mismatch"
    assert find_rule(lab, case, lab.output) is None


@pytest.mark.parametrize(
    "op", ["chunked_prefill_paged_decode", "unified_attention", "merge_attn_states"]
)
def test_rules_have_names_of_their_own(op):
    problem = make_problem(hostile(op=op, platform="sm_90", empty_slots="garbage"))
    found = [one.name for one in (*address_defects(problem), *output_defects(problem))]
    assert len(found) == len(set(found)) > 100


def writes_decodes_elsewhere(case: Case, call: KernelCall) -> None:
    """Write decodes after all other rows, with the stride of a head for that of a row."""
    right, flat = call.output.clone(), call.output.flatten()
    size = call.query.shape[1] * call.query.shape[2]
    rows = rows_of(make_problem(case), DECODES).nonzero().flatten().tolist()
    before = make_output(case).flatten()
    for row in rows:
        flat[row * size : (row + 1) * size] = before[row * size : (row + 1) * size]
    for row in rows:
        at = row * call.query.shape[2]
        flat[at : at + size] = right[row].flatten()
    call.output.copy_(flat.view_as(call.output))


def test_a_rule_may_concern_the_rows_of_one_kernel():
    """chunked_prefill_paged_decode computes decodes after all other rows."""
    case = hostile(
        query_lens=(3, 1, 4, 1),
        ctx_lens=(20, 9, 33, 17),
        num_heads=2,
        head_size=16,
        platform="sm_90",
    )
    found = diagnose(case, lab=FaultyLab(spoil=writes_decodes_elsewhere), limit=None, propose=False)
    assert DECODES in found.rule.text
    assert "with row × stride 1 in place of row × stride 0" in found.rule.text


def test_zeros_are_no_sign_of_reads_outside_of_the_cache(monkeypatch):
    """Outputs of 0 also follow from a block that is subtracted: all values are then read before the cache."""
    case = Case(
        num_heads=4, num_queries_per_kv=2, head_size=64, block_size=16, sm_scale=0.125,
        query_lens=(1, 5, 1), ctx_lens=(16, 15, 31), fill="all_rows", backend="model",
        distribution="normal", empty_slots="nan", output_init="nan", reference_dtype="float64",
        seed=827307999,
    )  # fmt: skip
    lab, two = Lab(device="cpu"), list(islice(further_cases(case), 2))
    monkeypatch.setattr(confirmation, "further_cases", lambda _: two)

    def zeros(other: Case) -> torch.Tensor:
        output = lab.output(other).clone()
        starts = zip(other.lengths.token_start_loc, other.lengths.query_lens, strict=False)
        output[[row for row, query_len in starts if query_len == 1]] = 0
        return output

    assert find_rule(lab, case, zeros) is None


@pytest.mark.parametrize(
    ("longest", "is_clear", "shown", "is_found"),
    [(128, True, 0, False), (999, False, 7, False), (999, False, 8, True), (999, True, 0, True)],
)
def test_a_rule_needs_many_new_tokens_and_clear_errors(
    monkeypatch, longest, is_clear, shown, is_found
):
    """With up to one tile of new tokens, tiles that are lost are those of the context. Small numbers explain
    errors just above their bounds, unless they explain many numbers but for small parts."""
    case = hostile(op="context_attention_fwd", query_lens=(1, 1), ctx_lens=(129, 1))
    defect = SimpleNamespace(family="loops", is_shown=lambda problem, seqs: True)
    rule, lens = SimpleNamespace(name="lost", defect=defect), []

    def confirmed(lab, other, output, candidates):
        lens.append(max(other.lengths.query_lens))
        locations = SimpleNamespace(is_clear=is_clear)
        diagnosis = SimpleNamespace(
            is_wrong=True, candidates=[SimpleNamespace(name="lost", shown=shown)]
        )
        found = SimpleNamespace(diagnosis=diagnosis, evidence=SimpleNamespace(locations=locations))
        return (candidates if lens[-1] <= longest else []), found

    monkeypatch.setattr(confirmation, "_explanations", lambda *_: ([rule], {"lost"}))
    monkeypatch.setattr(confirmation, "_shown", lambda *_: set())
    monkeypatch.setattr(confirmation, "_confirmed", confirmed)
    monkeypatch.setattr(confirmation, "_true_of", lambda lab, case, left, rerun: left)
    monkeypatch.setattr(confirmation, "_true_of_outside", lambda lab, case, left, rerun: left)
    found = find_rule(Lab(device="cpu"), case, lambda other: None)
    assert (found is not None) == is_found
    assert min(lens) == 1 < max(lens)


def test_without_a_run_with_other_numbers_outside_nothing_is_said_about_addresses():
    def refused(case: Case) -> torch.Tensor:
        raise KernelFailed("no run")

    case = hostile(op="context_attention_fwd", query_lens=(1, 1), ctx_lens=(129, 1))
    rules = [
        SimpleNamespace(defect=SimpleNamespace(family=name)) for name in ("addresses", "loops")
    ]
    assert confirmation._true_of_outside(Lab(device="cpu"), case, rules, refused) == rules[1:]


@pytest.mark.parametrize("always", [True, False])
def test_a_rule_must_change_a_right_output_of_the_same_lengths(always):
    """Equal scores follow from equal keys, and from rounding of large scores; normal ones are right then."""

    def equal_keys(case: Case, call: KernelCall) -> dict[str, object]:
        if not always and case.distribution != "large_scores":
            return {}
        first = call.key_cache[..., :1, :, :1]
        return {"key_cache": first.expand_as(call.key_cache).contiguous()}

    case = hostile(
        op="unified_attention", query_lens=(1, 5), ctx_lens=(20, 18), num_heads=4, head_size=32,
        platform="sm_90", distribution="large_scores",
    )  # fmt: skip
    found = find_rule(Lab(), case, FaultyLab(change=equal_keys).output)
    assert (found is not None) == always
