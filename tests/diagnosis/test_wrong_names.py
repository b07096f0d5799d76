"""Outputs that the diagnosis once named wrongly: each now gets the right name, or none and a description."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from fault_injection import correct_run, plant
from helpers.cases import hostile
from helpers.faulty_labs import FaultyLab

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.defects import DEFECTS
from attnlab.diagnosis import refinement
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.refinement import with_xray
from attnlab.diagnosis.reruns import second_case
from attnlab.kernels.backend import Backend, RunOptions, RunOutput
from attnlab.kernels.model import ModelBackend
from attnlab.kernels.triton.run_log import Wrap
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Predicted, make_problem
from attnlab.tensors.call import KernelCall
from attnlab.weights.conclude import xray

FEW = {"query_lens": (17, 1, 3), "ctx_lens": (16, 300, 254)}  # in place of twelve sequences


def names(diagnosis: Diagnosis) -> list[str]:
    return [candidate.name for candidate in diagnosis.explanations]


def leak(kind: str) -> Callable[[Case, KernelCall], None]:
    """Return a kernel's fault: NaN in the tail or in freed blocks of a decode reaches the output."""

    def spoil(case: Case, call: KernelCall) -> None:
        size = case.block_size
        for seq, seq_len in enumerate(case.lengths.seq_lens):
            has_freed = kind == "tail" or seq_len >= case.sliding_window + size
            if case.lengths.query_lens[seq] > 1 or not has_freed:
                continue
            column = (seq_len - 1) // size if kind == "tail" else 0
            slots = slice(seq_len % size or size, None) if kind == "tail" else slice(None)
            block = int(call.block_table[seq, column])
            if call.value_cache[block, :, :, slots].isnan().any():
                call.output[int(call.query_start_loc[seq])] = torch.nan

    return spoil


@pytest.mark.parametrize(("kind", "name"), [("tail", "tail_leaked"), ("freed", "freed_leaked")])
def test_tails_and_freed_blocks_are_poisoned_separately(kind, name):
    case = hostile(
        op="unified_attention", platform="sm_90", sliding_window=20, freed="empty",
        query_lens=(1, 1), ctx_lens=(84, 70),
    )  # fmt: skip
    diagnosis = diagnose(case, lab=FaultyLab(spoil=leak(kind)))
    assert names(diagnosis) == [name]
    assert list(diagnosis.slot_kinds) == [kind]


@pytest.mark.parametrize("name", ["newest_slot_nan", "newest_slot_zero"])
def test_a_filled_newest_slot_is_not_blamed(name):
    """The cache is complete, so its newest slots hold tokens, whatever the output looks like."""
    case, lab = hostile(empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)
    diagnosis = diagnose(case, plant(problem, output, DEFECTS[name], "all"), lab=lab)
    assert name not in names(diagnosis)
    by_name = {candidate.name: candidate for candidate in diagnosis.candidates}
    assert by_name[name].verdict == "excluded by inputs"


def test_an_empty_newest_slot_is_possible():
    problem = make_problem(hostile(stage="cast_after_cumsum", empty_slots="zeros"))
    assert DEFECTS["newest_slot_zero"].is_possible(problem)
    assert not DEFECTS["newest_slot_nan"].is_possible(problem)


def test_a_defect_that_changes_nothing_explains_nothing():
    """Its bound is a little wider than the correct one, and the error lies between the two."""
    case, lab = hostile(empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)

    def wider(one, row_slice) -> Predicted:
        correct = one.correct(row_slice)
        return Predicted(output=correct.output, bound=1.5 * correct.bound)

    row_slice = problem.row_slice_of(20, torch.arange(6))
    correct = problem.correct(row_slice)
    output = output.clone()
    output[20] = (correct.output + 1.25 * correct.bound)[0].to(output.dtype)
    harmless = dataclasses.replace(DEFECTS["scale_doubled"], name="wider", compute=wider)
    diagnosis = diagnose(case, output, lab=lab, defects=(harmless,))
    assert diagnosis.is_wrong
    assert names(diagnosis) == []


def test_an_int32_overflow_is_not_a_16_bit_block():
    """The run reports the product that overflowed; the numbers alone would fit truncated block numbers."""
    table = ((65537, 4, 3), (65540, 7, 5))
    case = hostile(
        num_heads=2, num_queries_per_kv=1, head_size=16, query_lens=(1, 1), ctx_lens=(20, 30),
        block_table=table, empty_slots="zeros", platform="sm_90",
    )  # fmt: skip
    defect = DEFECTS["block_16_bit"]

    def spoil(one: Case, call: KernelCall) -> None:
        problem = make_problem(one)
        call.output.copy_(plant(problem, call.output, defect, "all"))

    assert "block_16_bit" in names(diagnose(case, lab=FaultyLab(spoil=spoil)))
    wrap = Wrap(file="kernel.py", line=7, left=65537, right=65536)
    diagnosis = diagnose(case, lab=FaultyLab(spoil=spoil, wraps=(wrap,)))
    assert "block_16_bit" not in names(diagnosis)
    assert (diagnosis.status, diagnosis.cause) == ("described", None)
    assert len(diagnosis.wraps) == 1
    assert any("kernel.py" in sentence for sentence in diagnosis.sentences())


def test_degenerate_cache_scales_are_separated_by_a_second_case():
    """A K scaled by v_scale = 0.25 equals one scaled by k_scale squared, 0.5 ** 2."""
    case = hostile(
        kv_cache_dtype="fp8", k_scale=0.5, v_scale=0.25, empty_slots="garbage", platform="sm_90"
    )
    lab = FaultyLab(change=lambda _, call: {"k_scale": call.v_scale})
    diagnosis = diagnose(case, lab=lab)
    assert names(diagnosis) == ["k_scale_is_v_scale"]
    captured = diagnose(case, lab.output(case), lab=Lab())
    assert captured.cause is None


def test_half_of_1_is_not_the_scale_of_4_heads():
    case = hostile(num_heads=4, sm_scale=1.0, empty_slots="garbage", platform="sm_90", **FEW)
    lab = FaultyLab(change=lambda _, call: {"sm_scale": (call.sm_scale or 0) / 2})
    for diagnosis in (diagnose(case, lab=lab), diagnose(case, lab.output(case), lab=Lab())):
        assert diagnosis.cause is None
        assert diagnosis.status == "described"
        assert diagnosis.pattern.of("softmax_scale")[0].values["scale"] == pytest.approx(
            0.5, rel=0.01
        )


def test_a_name_that_does_not_hold_in_a_second_case_is_withdrawn():
    """A kernel that loses position 39 for every length seems to drop the newest token of this batch."""
    case = hostile(query_lens=(1,), ctx_lens=(39,), empty_slots="garbage", platform="sm_90")

    def spoil(one: Case, call: KernelCall) -> None:
        problem = make_problem(one)
        for seq in range(problem.num_seqs):
            row_slice = problem.row_slice_of(problem.row_starts()[seq], torch.arange(6))
            inputs = problem.attention_inputs(row_slice)
            visible = inputs.visible.clone()
            visible[:, 39:40] = False
            wrong = problem.predict(dataclasses.replace(inputs, visible=visible))
            call.output[problem.rows(row_slice)] = wrong.output.to(call.output.dtype)

    captured = diagnose(case, FaultyLab(spoil=spoil).output(case), lab=Lab())
    assert "newest_token_dropped" in names(captured)
    diagnosis = diagnose(case, lab=FaultyLab(spoil=spoil))
    assert names(diagnosis) == []
    assert len(diagnosis.withdrawn) == 1
    assert diagnosis.status == "unexplained"  # its pattern does not hold there, either


def test_a_second_case_has_other_lengths_and_odd_scales():
    case = hostile(kv_cache_dtype="fp8", k_scale=0.5, v_scale=0.25)
    other = second_case(case)
    assert (other.k_scale, other.v_scale) == (0.7, 0.3)
    assert other.sm_scale != case.head_size**-0.5
    assert [q == 1 for q in other.lengths.query_lens] == [q == 1 for q in case.lengths.query_lens]
    assert other.lengths.ctx_lens != case.lengths.ctx_lens


def test_a_phantom_key_of_zeros_is_not_called_a_sink():
    case, lab = hostile(empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)
    defect = DEFECTS["zero_key_counted"]
    diagnosis = diagnose(case, plant(problem, output, defect, "all"), lab=lab)
    assert names(diagnosis) == ["zero_key_counted"]
    assert diagnosis.pattern.of("sum")[0].values["added"] == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("empty", [0.0, torch.nan])
def test_rows_that_see_no_key_may_be_zero_or_nan(empty):
    """Without its newest token, a sequence of one token has no key; kernels return 0 or NaN."""
    case, lab = hostile(query_lens=(1, 4, 1), ctx_lens=(0, 9, 40), empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)
    wrong = plant(problem, output, DEFECTS["newest_token_dropped"], "all")
    assert (wrong[0] == 0).all()
    wrong[0] = empty
    assert "newest_token_dropped" in names(diagnose(case, wrong, lab=lab))


@pytest.mark.parametrize("output_init", ["nan", "recycled"])
def test_rows_of_a_sequence_that_are_not_written(output_init):
    """A grid that ends at 128 rows leaves the rest of a longer prefill unwritten."""
    case = hostile(query_lens=(150, 1), ctx_lens=(0, 40), output_init=output_init, platform="sm_90")

    def spoil(one: Case, call: KernelCall) -> None:
        query_len = one.lengths.query_lens[0]
        call.output[128:query_len] = Lab().call(one).output[128:query_len]

    diagnosis = diagnose(case, lab=FaultyLab(spoil=spoil))
    assert diagnosis.unwritten == list(range(128, 150))
    assert names(diagnosis) == ["rows_never_written"]


def test_rows_that_see_no_key_under_a_defect_do_not_name_it():
    """A merge that gives NaN where a part is empty: so does a dropped only token."""
    case = hostile(
        op="merge_attn_states", platform="sm_90", query_lens=(1, 1, 1), ctx_lens=(0, 15, 40)
    )

    def spoil(one: Case, call: KernelCall) -> None:
        for seq, ctx_len in enumerate(one.lengths.ctx_lens):
            if ctx_len == 0:
                rows = slice(*call.query_start_loc[seq : seq + 2].tolist())
                call.output[rows] = torch.nan

    captured = diagnose(case, FaultyLab(spoil=spoil).output(case), lab=Lab(), propose=False)
    assert "newest_token_dropped" in names(captured)
    assert names(diagnose(case, lab=FaultyLab(spoil=spoil))) == []


def test_a_hypothesis_whose_bound_covers_the_error_explains_nothing():
    """A defect under which scores are so large that their rounding decides the weights fits any output."""
    case, lab = hostile(empty_slots="garbage"), Lab()
    _, output = correct_run(lab, case)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))

    def large_scores(one, row_slice) -> Predicted:
        inputs = one.attention_inputs(row_slice)
        found = one.predict(dataclasses.replace(inputs, sm_scale=80 * inputs.sm_scale))
        return Predicted(output=found.output, bound=torch.full_like(found.bound, 6e15))

    defect = dataclasses.replace(DEFECTS["scale_doubled"], name="large", compute=large_scores)
    diagnosis = diagnose(case, output + 1e3 * noise.to(output.dtype), lab=lab, defects=(defect,))
    assert diagnosis.is_wrong
    assert names(diagnosis) == []
    assert diagnosis.candidates[0].verdict == "excluded by value"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_scale_times_0_7_is_not_base_2(dtype, monkeypatch):
    """ln(2) is 0.69: where the scores hardly differ, both are within rounding, but one fits better."""
    monkeypatch.setattr(refinement, "_XRAY_S", 0.1)
    case = hostile(dtype=dtype, sm_scale=0.02, empty_slots="garbage", platform="sm_90", **FEW)
    lab = FaultyLab(change=lambda _, call: {"sm_scale": 0.7 * call.sm_scale})
    captured = diagnose(case, lab.output(case), lab=Lab(), propose=False)
    assert captured.cause is None or captured.cause.name != "exp2_for_exp"
    assert "exp2_for_exp" not in names(diagnose(case, lab=lab, limit=None, propose=False))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mask_that_is_aligned_at_the_top_left_is_named(dtype):
    case, lab = hostile(empty_slots="garbage", dtype=dtype), Lab()
    problem, output = correct_run(lab, case)
    wrong = plant(problem, output, DEFECTS["causal_top_left"], "all")
    assert names(diagnose(case, wrong, lab=lab, propose=False)) == ["causal_top_left"]


def test_a_scale_that_one_row_of_two_keys_fits_is_not_stated():
    """Two weights with the sum 1 fit at some scale, whatever the fault is."""
    case, lab = hostile(query_lens=(1,), ctx_lens=(1,), num_heads=1, num_queries_per_kv=1), Lab()
    problem, output = correct_run(lab, case)
    wrong = plant(problem, output, DEFECTS["causal_top_left"], "all")
    pattern = diagnose(case, wrong, lab=lab, propose=False, defects=()).pattern
    assert [fact.kind for fact in pattern.rules] == []


# Names that an X-ray of the kernel contradicts are withdrawn; without a name, its rule is stated.


CASE = hostile(
    query_lens=(1, 5, 1), ctx_lens=(20, 18, 40), platform="sm_90", empty_slots="garbage",
    num_heads=4, head_size=32,
)  # fmt: skip
Change = Callable[[KernelCall], dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class WrongBackend(ModelBackend):
    """The models, run with wrong arguments."""

    change: Change = lambda call: {}
    models_prefill = False

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        """Run the models with the changed call, into the same output."""
        return super().run(dataclasses.replace(call, **self.change(call)), target, kernels, options)


@dataclass(slots=True)
class WrongLab(Lab):
    """A lab with a wrong backend."""

    change: Change = lambda call: {}

    def backend(self, case: Case) -> Backend:
        return WrongBackend(change=self.change)


def scaled(factor: float) -> Change:
    return lambda call: {"sm_scale": factor * (call.sm_scale or call.query.shape[2] ** -0.5)}


def planted(name: str) -> Diagnosis:
    """Return the diagnosis of a planted defect, from the output alone."""
    lab = Lab()
    problem, output = correct_run(lab, CASE)
    return diagnose(CASE, plant(problem, output, DEFECTS[name], "all"), lab=lab, propose=False)


def test_a_name_that_the_weights_contradict_is_withdrawn():
    diagnosis = planted("scale_doubled")
    assert names(diagnosis) == ["scale_doubled"]
    for change in (lambda call: {}, scaled(0.5)):
        again = with_xray(diagnosis, xray(CASE, backend=WrongBackend(change=change), confirm=False))
        assert names(again) == []
        assert len(again.withdrawn) == 1


def test_a_name_that_the_weights_confirm_is_kept():
    found = xray(CASE, backend=WrongBackend(change=scaled(2.0)), confirm=False)
    assert names(with_xray(planted("scale_doubled"), found)) == ["scale_doubled"]


def test_a_scale_without_a_name_is_described_by_the_xray():
    diagnosis = diagnose(CASE, lab=WrongLab(change=scaled(1.3)), propose=False)
    assert (diagnosis.status, diagnosis.cause) == ("described", None)
    assert diagnosis.xray.status == "described"
    assert diagnosis.to_dict()["xray"]["descriptions"]
    assert diagnosis.sentences()[0] == diagnosis.weights.text
    text = diagnosis.weights.description.text
    assert [text in sentence for sentence in diagnosis.sentences()].count(True) == 1


def test_a_kernel_with_a_known_fault_keeps_its_name():
    diagnosis = diagnose(CASE, lab=WrongLab(change=scaled(2.0)), propose=False)
    assert names(diagnosis) == ["scale_doubled"]
    assert diagnosis.xray is not None
