"""Rules beyond the catalogue: wrong addresses, found from an output and confirmed on further cases."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from helpers.cases import hostile

from attnlab.case.case import Case
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.defects.problem import make_problem
from attnlab.diagnosis.address_defects import address_defects
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.output_rules import MERGE_LAWS, output_defects
from attnlab.diagnosis.rows_of_rule import DECODES, rows_of
from attnlab.kernels.backend import RunOutput
from attnlab.kernels.model import backend as model
from attnlab.kernels.model.merge import partials
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_output

Change = Callable[[KernelCall], dict[str, object]]


@dataclasses.dataclass(slots=True)
class ReadsWrong(Lab):
    """A lab whose kernels get changed arguments and write elsewhere.

    ``last_row_only`` writes all rows to row 0; ``head_stride``, if given, replaces that of the output.
    """

    change: Change = lambda call: {}
    last_row_only: bool = False
    head_stride: Callable[[Case], int] | None = None

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        model.run(
            dataclasses.replace(call, **self.change(call)), Target.of(case), decide(case).kernels
        )
        if self.last_row_only:
            call.output[0] = call.output[-1]
            call.output[1:] = make_output(case)[1:]
        if self.head_stride is not None:
            rows, heads, size = call.output.shape
            written = make_output(case).flatten()
            for row in range(rows):
                for head in range(heads):  # the last one wins
                    to = row * heads * size + head * self.head_stride(case)
                    room = written[to : to + size]
                    room.copy_(call.output[row, head][: len(room)])
            call.output.copy_(written.view(rows, heads, size))
        return RunOutput()


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


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (queries_of_kv_heads, ("queries", "(KV head) × stride 1", "head × stride 1")),
        (values_of_pairs, ("cached values", "(KV head // 2) × stride")),
    ],
)
def test_a_wrong_read_is_described_by_its_address(change, parts):
    case = hostile(op="unified_attention", platform="sm_90", empty_slots="garbage")
    diagnosis = diagnose(case, lab=ReadsWrong(change=change))
    assert diagnosis.status == "described"
    assert diagnosis.rule.cases > 2
    assert not diagnosis.rule.only_decodes
    assert all(part in diagnosis.rule.text for part in parts)


def test_rows_written_to_one_row_are_described_by_the_missing_term():
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(1, 1, 1), ctx_lens=(9, 15, 40)
    )
    diagnosis = diagnose(case, lab=ReadsWrong(last_row_only=True))
    assert "the term row × stride 0 is missing" in diagnosis.rule.text


def test_rows_written_with_the_stride_of_another_tensor():
    """A log-sum-exp [heads, rows] has the number of rows as its stride of heads."""
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(1, 3, 1), ctx_lens=(9, 15, 40)
    )
    lab = ReadsWrong(head_stride=lambda one: one.lengths.num_tokens)
    diagnosis = diagnose(case, lab=lab)
    assert "with head × prefix_lse stride 0 in place of head × stride 1" in diagnosis.rule.text


@pytest.mark.parametrize("name", [name for name in MERGE_LAWS if "weight 1" in name])
def test_a_part_with_weight_1_may_be_empty(name):
    """The log-sum-exp of an empty part is -inf; its output is 0."""
    lse = torch.tensor([[0.5, -torch.inf], [1.5, 2.0]])[:, :, None, None]
    found = MERGE_LAWS[name](lse).squeeze()
    part = 0 if "prefix" in name else 1
    assert found[part].tolist() == [1.0, 1.0]
    assert found.isfinite().all()


@dataclasses.dataclass(slots=True)
class AddsWeights(Lab):
    """A lab whose merge adds the weight of the suffix in place of its weighted output."""

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        parts = partials(call, Target.of(case))
        lse = torch.stack([parts.prefix_lse, parts.suffix_lse]).double()
        weights = lse.softmax(0).transpose(1, 2)[..., None]
        call.output[:] = weights[0] * parts.prefix_output.double() + weights[1]
        return RunOutput()


def test_a_weight_that_is_added_in_place_of_a_weighted_output():
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(1, 3), ctx_lens=(9, 40), num_heads=4
    )
    diagnosis = diagnose(case, lab=AddsWeights())
    assert "the weight of the suffix is added" in diagnosis.rule.text
    assert diagnosis.rule.cases > 2


def test_a_fault_that_no_rule_predicts_gets_none():
    """Values one element of memory later: no term of the address is changed, one is added."""
    case = hostile(op="context_attention_fwd", platform="sm_90", empty_slots="garbage")
    diagnosis = diagnose(case, lab=ReadsWrong(change=offset_as_position))
    assert diagnosis.status != "nothing wrong"
    assert diagnosis.rule is None


@pytest.mark.parametrize(
    "op", ["chunked_prefill_paged_decode", "unified_attention", "merge_attn_states"]
)
def test_rules_have_names_of_their_own(op):
    problem = make_problem(hostile(op=op, platform="sm_90", empty_slots="garbage"))
    found = [one.name for one in (*address_defects(problem), *output_defects(problem))]
    assert len(found) == len(set(found)) > 100


@dataclasses.dataclass(slots=True)
class DecodesElsewhere(Lab):
    """A lab that writes decodes after all other rows, with the stride of a head for that of a row."""

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        model.run(call, Target.of(case), decide(case).kernels)
        right, flat = call.output.clone(), call.output.flatten()
        size = call.query.shape[1] * call.query.shape[2]
        problem = make_problem(case)
        rows = rows_of(problem, DECODES).nonzero().flatten().tolist()
        before = make_output(case).flatten()
        for row in rows:
            flat[row * size : (row + 1) * size] = before[row * size : (row + 1) * size]
        for row in rows:
            at = row * call.query.shape[2]
            flat[at : at + size] = right[row].flatten()
        call.output.copy_(flat.view_as(call.output))
        return RunOutput()


def test_a_rule_may_concern_the_rows_of_one_kernel():
    """chunked_prefill_paged_decode computes decodes after all other rows."""
    case = hostile(
        query_lens=(3, 1, 4, 1),
        ctx_lens=(20, 9, 33, 17),
        num_heads=2,
        head_size=16,
        platform="sm_90",
    )
    found = diagnose(case, lab=DecodesElsewhere(), limit=None, propose=False)
    assert found.rule is not None
    assert DECODES in found.rule.text
    assert "with row × stride 1 in place of row × stride 0" in found.rule.text
