"""Known facts about the ROCm kernel, checked on its source."""

import pytest
import torch
from helpers.cases import call_of, hostile, same_bits
from helpers.rocm import real

from attnlab.case.errors import KernelRejected
from attnlab.contracts.contract import Target
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.vllm.source import Source
from attnlab.lab.reference import reference
from attnlab.tensors.batch import make_batch


def test_int64_decodes_write_row_0_alone_with_another_sequences_cache(rocm: Source) -> None:
    """Eight decodes with int64 query_start_loc [0 … 8]: row 0 is query 0 over the cache of sequence 1."""
    case = hostile(
        query_lens=(1,) * 8,
        ctx_lens=tuple(range(30, 38)),
        query_start_loc_dtype="int64",
        empty_slots="zeros",
        release=rocm.rules,
        sm_scale=0.125,
    )
    call = real(case, rocm)
    written = ~call.output.isnan().flatten(1).any(1)
    assert written.tolist() == [True] + [False] * 7
    batch = make_batch(case)
    first, second = batch.kv_start_loc[1], batch.kv_start_loc[2]
    key, value = (
        t[first:second].double().repeat_interleave(2, 1) for t in (batch.key, batch.value)
    )
    weights = torch.einsum("hd,thd->ht", call.query[0].double(), key).mul(0.125).softmax(1)
    expected = torch.einsum("ht,thd->hd", weights, value)
    assert (
        call.output[0].double() - expected
    ).abs().max() < 5e-3  # rounding; another cache: above 0.5


def test_the_seed_batch_as_int64_writes_nothing(rocm: Source) -> None:
    """Prefills before a decode, read as int32 pairs: no neighbours differ by 1, so no row is written."""
    case = hostile(
        query_lens=(5, 3, 1), ctx_lens=(4, 6, 20), query_start_loc_dtype="int64", release=rocm.rules
    )
    assert real(case, rocm).output.isnan().all()
    fixed = case.replace(query_start_loc_dtype="int32", empty_slots="zeros")
    assert real(fixed, rocm).output.isnan().flatten(1).all(1).tolist() == [True] * 8 + [False]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block_table_dtype": "int64"}, "expected scalar type Int but found Long"),
        ({"seq_lens_dtype": "int64"}, "expected scalar type Int but found Long"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "Unsupported KV cache dtype: fp8_e5m2"),
        ({"dtype": "float32"}, "Unsupported data type: float"),
        ({"head_size": 96}, "Unsupported head size: 96"),
        ({"block_size": 64}, "Unsupported block size: 64"),
        ({"num_heads": 17, "num_queries_per_kv": 17}, "Unsupported gqa ratio: 17"),
    ],
)
def test_the_host_code_refuses_with_its_own_text(rocm: Source, changes, text: str) -> None:
    """Each host check raises its text and leaves the output unchanged."""
    case = hostile(release=rocm.rules, **changes)
    call, _ = call_of(case)
    before = call.output.clone()
    with pytest.raises(KernelRejected) as caught:
        rocm_source.run(call, Target.of(case), rocm)
    assert str(caught.value) == text
    assert same_bits(call.output, before)


@pytest.mark.parametrize("group", [2, 6])
def test_the_last_blocks_tail_reaches_the_output_through_values_alone(
    rocm: Source, group: int
) -> None:
    """After seq_len, NaN in K changes no bit; NaN in V makes the row NaN in 0.11.2 and changes no bit
    in 0.33.0."""
    special = {"num_heads": group, "num_queries_per_kv": group, "head_size": 64}
    case = hostile(
        query_lens=(1,),
        ctx_lens=(20,),
        release=rocm.rules,
        empty_slots="zeros",
        sm_scale=0.1,
        **special,
    )
    clean = real(case, rocm).output
    for name in ("key_cache", "value_cache"):
        call, cache = call_of(case)
        block, offset = cache.provenance.slot(0, 20)
        after = slice(offset + 1, None)
        tails = {
            "key_cache": (block, ..., after, slice(None)),
            "value_cache": (block, ..., after),
        }
        getattr(call, name)[tails[name]] = float("nan")
        rocm_source.run(call, Target.of(case), rocm)
        poisoned = name == "value_cache" and rocm.rules == "0.11.2"
        assert bool(call.output.isnan().all()) is poisoned
        assert same_bits(call.output, clean) is not poisoned


def test_the_host_code_chooses_its_kernels(rocm: Source) -> None:
    """Up to 4 query heads per KV head use the 4×4 kernel, more use 16×16; then the merge."""
    for group, attention in ((4, "mfma4"), (5, "mfma16")):
        case = hostile(num_heads=group, num_queries_per_kv=group, release=rocm.rules)
        call, _ = call_of(case)
        arguments = rocm_source.op_arguments(call, Target.of(case))
        first, second = rocm_source.op_of(rocm, case.machine).launched(arguments)
        assert first.startswith(f"paged_attention_ll4mi_QKV_{attention}_kernel<_Float16, ")
        assert second == "paged_attention_ll4mi_reduce_kernel<_Float16, _Float16, 64, 64, 256, 1>"


def test_fp8_matrix_cores_average_the_values(rocm: Source) -> None:
    """With mfma_type "fp8", an option, the 16×16 kernel's output is the mean of V: the source divides the
    query by its scale where it means to multiply, and divides the scores by it again, so that all
    weights are alike. The 4×4 kernel knows no such option."""
    for group, averages in ((1, False), (8, True)):
        case = hostile(
            num_heads=group,
            num_queries_per_kv=group,
            head_size=128,
            kv_cache_dtype="fp8",
            query_lens=(1,),
            ctx_lens=(300,),
            empty_slots="zeros",
            release=rocm.rules,
            sm_scale=128**-0.5,
        )
        call, _ = call_of(case)
        arguments = {**rocm_source.op_arguments(call, Target.of(case)), "mfma_type": "fp8"}
        rocm_source.op_of(rocm, case.machine)(arguments)
        batch = make_batch(case)
        mean = batch.value[:301].double().mean(0).repeat_interleave(group, 0)
        to_mean = (call.output[0].double() - mean).abs().max()
        to_attention = (call.output - reference(case, batch)).abs().max()
        # A value times FP8's 1/301, rounded by up to 1/16; attention and mean differ by 0.2.
        assert bool(to_mean < 0.05) is averages
        assert bool(to_attention < 0.05) is not averages
