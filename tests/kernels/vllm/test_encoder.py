"""triton_prefill_attention, which gets no cache: the model agrees with it, and faults of it are found."""

import shutil

import pytest
from helpers.agreement import agrees, bound, modelled, real
from helpers.encoder_cases import random_encoder_case
from helpers.sources import needs_triton, of_release

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import ENCODER
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels import find_backend
from attnlab.lab.lab import Lab

pytestmark = [needs_triton, pytest.mark.releases]
FEW = 6  # random Cases; 200 agree (docs/coverage.md)
# Changes of the source, as (text, other text).
FAULTS = {
    "window": ("pos_q - pos_k <= SLIDING_WINDOW_Q", "pos_q - pos_k < SLIDING_WINDOW_Q"),
    "first tile": ("tl.maximum(0, (first_needed", "tl.maximum(0, BLOCK_N + (first_needed"),
    "causal": ("mask &= pos_q >= pos_k", "mask &= pos_q > pos_k"),
    "head": ("cur_head // kv_group_num", "cur_head % kv_group_num"),
    "head size": ("mask_d = offs_d < Lk", "mask_d = offs_d < BLOCK_DMODEL"),
}


def test_the_model_agrees_with_the_op():
    source = of_release("0.33.0")
    for number in range(FEW):
        case = random_encoder_case(number)
        within = bound(case)
        assert agrees(modelled(case).output, real(case, source).output, within), number
        assert within[: case.lengths.num_tokens].max() < 0.2


@pytest.fixture(scope="module")
def cases():
    """Return the hostile Cases of the op, the shortest first, without those that 0.33.0 gets wrong."""
    backend = find_backend("vllm", of_release("0.33.0").path, "cpu")
    found = [
        one
        for one in hostile_cases(backend, ENCODER, "sm_90", None, 0)
        if one.sliding_window != 1 and one.op_argument == NONE
    ]
    return sorted(found, key=lambda one: sum(one.lengths.query_lens) * one.num_heads)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, cases, tmp_path):
    """Each change makes some hostile Case wrong; the op without it is right there."""
    root = of_release("0.33.0").root
    shutil.copytree(root / "vllm", tmp_path / "vllm")
    file = tmp_path / "vllm/v1/attention/ops/triton_prefill_attention.py"
    before, after = FAULTS[name]
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    lab = Lab(source=tmp_path, device="cpu")
    case = next(one for one in cases if lab.run(one).status == "mismatch")
    assert Lab(source=root, device="cpu").run(case).status == "match"


def test_a_window_of_one_token_is_lost():
    """vLLM's backend passes 0 for it, which the op takes for no window (0.33.0)."""
    source = of_release("0.33.0")
    case = Case(
        op=ENCODER,
        backend="vllm",
        sliding_window=1,
        num_heads=1,
        head_size=32,
        query_lens=(4,),
        ctx_lens=(0,),
        distribution="normal",
        platform="sm_90",
    )
    output = real(case, source).output
    within = bound(case)
    assert not agrees(modelled(case).output, output, within)
    assert agrees(modelled(case.replace(sliding_window=0)).output, output, within)
