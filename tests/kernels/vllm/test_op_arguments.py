"""Op arguments: each agrees with the reference on a release, and a wrong value of it does not."""

import dataclasses

import pytest
import torch
from helpers.argument_cases import DRAWN, FORMATS, random_argument_case, random_format_case
from helpers.cases import refused
from helpers.masked_cases import random_case
from helpers.sources import of_release

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.masks import CAUSAL, MASKS
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.ops import WRITE
from attnlab.case.platforms import PLATFORMS
from attnlab.checker.case_check import check_case
from attnlab.checker.hostile import ARGUMENT_VARIANTS, DEFAULT_CASES, hostile_cases
from attnlab.kernels import find_backend
from attnlab.kernels.vllm import op_arguments
from attnlab.kernels.vllm.backend import VllmBackend, load
from attnlab.kernels.vllm.op_arguments import pass_argument
from attnlab.lab.cache_write import int4_write_bound, write_bound
from attnlab.lab.lab import Lab
from attnlab.tensors.formats import FORMATS as FORMATS_OF_ELEMENTS
from attnlab.tensors.formats import int4_scale, pack_int4, rotate, rotate_back, unpack_int4
from attnlab.tensors.quantised import scaled_numbers, stored_numbers

EACH = 3

# Faults of unified_attention in 0.33.0: NaN after the end of a sequence is multiplied by 0.
# INT4 attention does not get the arguments of three masks, which unified_attention accepts.
KNOWN = {
    ("tensor_descriptors", CAUSAL),
    ("int8_per_token_head", CAUSAL),  # scales of values that the window hides are read
    *(
        ("int4_per_token_head", mask)
        for mask in ("ranges_in_window", "prefix_and_window", "chunks")
    ),
}
# Arguments without an effect on the result, because only where or how the op works depends on them.
NEUTRAL = {
    *("tensor_descriptors", "block_pointers", "flat_buffers", "head_major", "head_major_packed"),
    *(
        "gaps",
        "default_scales",
        "no_lse",
        "short_scratch",
        "no_max_seq_len",
        "byte_cache",
    ),
    *("named_cache_dtype", "fp8_tokens", "suffix_only_tokens", "cached_new_tokens", "fp8_output"),
}


@pytest.fixture(scope="module")
def backend():
    """Provide the ops of 0.33.0."""
    return find_backend("vllm", of_release("0.33.0").path, "cpu")


def cases(backend, op):
    """Return the cases of an op with an op argument."""
    found = hostile_cases(backend, op, "sm_90", DEFAULT_CASES, 0)
    return [case for case in found if case.op_argument != NONE]


def test_every_argument_has_a_variant():
    names = {variant.fields.get("op_argument", NONE) for variant in ARGUMENT_VARIANTS}
    assert names == {NONE, *OP_ARGUMENTS}
    assert {one.fields.get("mask", CAUSAL) for one in ARGUMENT_VARIANTS} == set(MASKS)
    assert {*op_arguments._MAKERS} == {n for n, one in OP_ARGUMENTS.items() if one.passes is None}


@pytest.mark.releases
@pytest.mark.slow
def test_release_agrees_with_the_reference(backend):
    """The faults are those of 0.33.0; `attnlab check` runs the cases of the other ops."""
    lab, found = Lab(source=backend.path, device="cpu"), set()
    for case in cases(backend, "unified_attention"):
        if not case.num_splits and any(one.is_fault for one in check_case(lab, backend, case)):
            found.add((case.op_argument, case.mask))
    assert found == KNOWN


@pytest.mark.releases
def test_references_differ_from_those_without_the_argument(backend):
    """A value that changes nothing could not show a fault."""
    lab = Lab(source=backend.path, device="cpu")
    for case in cases(backend, "unified_attention"):
        plain = case.replace(op_argument=NONE)
        differs = not torch.allclose(lab.reference(case), lab.reference(plain), atol=1e-3)
        assert differs == (case.op_argument not in NEUTRAL), case.op_argument


@pytest.mark.releases
def test_a_wrong_value_is_found(backend, monkeypatch):
    """The op gets another value than the reference."""
    case = next(one for one in cases(backend, "unified_attention") if one.alibi)
    wrong = dataclasses.replace(case.argument, passes={"use_alibi_sqrt": "False"})
    monkeypatch.setitem(OP_ARGUMENTS, case.op_argument, wrong)
    (fault,) = (
        one
        for one in check_case(Lab(source=backend.path, device="cpu"), backend, case)
        if one.is_fault
    )
    assert (fault.kind, fault.diagnosis) == (
        "wrong_output",
        "op_argument alibi_sqrt: argument ignored",
    )


@pytest.mark.releases
@pytest.mark.parametrize("mask", ["ranges", "tree"])
def test_masks_with_int4_agree_with_the_release(backend, mask):
    """200 Cases of each agree (docs/coverage.md)."""
    lab = Lab(source=backend.path, device="cpu")
    for number in range(EACH):
        case = random_case(mask, number, backend="vllm", op_argument="int4_per_token_head")
        assert lab.run(case).status == "match", number


@pytest.mark.releases
def test_a_mask_that_int4_ignores_is_named(backend):
    """0.33.0 passes neither the prefixes of R-SWA nor chunk_lookback to its kernel for INT4."""
    found = {}
    for case in cases(backend, "unified_attention"):
        if case.op_argument == "int4_per_token_head" and case.mask in (
            "prefix_and_window",
            "chunks",
        ):
            lab = Lab(source=backend.path, device="cpu")
            (fault,) = (one for one in check_case(lab, backend, case) if one.is_fault)
            found[case.mask] = fault.diagnosis.partition(": ")[2]
    assert found == {"prefix_and_window": "mask and window ignored", "chunks": "mask ignored"}


@pytest.mark.releases
@pytest.mark.parametrize("name", FORMATS)
def test_random_cases_agree_with_the_release(backend, name):
    """200 Cases of each agree (docs/coverage.md)."""
    lab = Lab(source=backend.path, device="cpu")
    for number in range(EACH):
        assert lab.run(random_format_case(name, number)).status == "match", number


@pytest.mark.releases
def test_random_cases_of_every_other_argument_agree(backend):
    """200 Cases of each agree, under the interpreter and on a GPU (docs/coverage.md)."""
    lab = Lab(source=backend.path, device="cpu")
    for number, name in enumerate(DRAWN):
        assert lab.run(random_argument_case(name, number)).status == "match", name


def _next_slot(scales):
    """Return the scales of the slot before, each in its block."""
    return scales.roll(1, dims=1)


def _swapped(stored):
    """Return bytes with their nibbles exchanged."""
    return (stored >> 4) | (stored << 4)


FAULTS = {
    "scale of another token": lambda given: {"v_scale_cache": _next_slot(given["v_scale_cache"])},
    "scale of keys for values": lambda given: {"v_scale_cache": given["k_scale_cache"]},
    "nibbles exchanged": lambda given: {name: _swapped(given[name]) for name in ("k", "v")},
    "values from one element before": lambda given: {
        "v": given["v"].as_strided(
            given["v"].shape, given["v"].stride(), given["v"].storage_offset() - 1
        )
    },
    "values of the next row": lambda given: {"v": given["v"].roll(1, dims=1)},
}


@pytest.mark.releases
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in FORMATS[:3] for fault in list(FAULTS)[:2]),
        ("int4_per_token_head", "nibbles exchanged"),
        ("diffkv", "values from one element before"),
        ("diffkv", "values of the next row"),
    ],
)
def test_a_planted_fault_of_a_format_is_found(backend, monkeypatch, name, fault):
    """The op gets another cache than the reference reads."""
    make, lab = op_arguments._MAKERS[name], Lab(source=backend.path, device="cpu")

    def faulty(case, given):
        made = make(case, given)
        if isinstance(made, dict):
            return {**made, **FAULTS[fault](made)}
        arguments = {**made.arguments, **FAULTS[fault](made.arguments)}
        return dataclasses.replace(made, arguments=arguments)

    case = random_format_case(name, 1, query_lens=(1, 5), ctx_lens=(20, 7), sliding_window=0)
    assert lab.run(case).status == "match"
    monkeypatch.setitem(op_arguments._MAKERS, name, faulty)
    assert lab.run(case).status == "mismatch"


@pytest.mark.parametrize("head_size", [16, 48])
def test_int4_rotates_packs_and_unpacks(head_size):
    """The inverse gives the tokens; stored numbers are off by half a step, or by one where they are cut."""
    tokens = torch.randn(5, 3, head_size, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose(rotate_back(rotate(tokens)), tokens)
    stored, scales = pack_int4(tokens)
    assert (stored.shape[-1], stored.dtype) == (head_size // 2, torch.uint8)
    off = (unpack_int4(stored, scales) - rotate(tokens)).abs() / int4_scale(scales)[..., None]
    assert float(off.max()) <= 1.01
    assert float(off.mean()) < 0.3
    tokens[0, 0, 1] = float("nan")
    assert pack_int4(tokens)[1].isnan().nonzero().tolist() == [[0, 0]]


@pytest.mark.releases
def test_the_rotation_is_that_of_the_release(backend):
    """R of vLLM and of the reference, for sizes that are powers of two and others."""
    source = VllmBackend(path=backend.path, requested_device="cpu").source
    module = load(source, PLATFORMS["sm_90"], "cpu").loader.load("int4_per_token_head")
    for size in (16, 48, 64):
        tokens = torch.randn(3, size)
        assert torch.allclose(module.single_rht(tokens).double(), rotate(tokens), atol=1e-4)


@pytest.mark.releases
def test_a_release_without_diffkv_is_unsupported():
    lab = Lab(source=of_release("0.11.2").path, device="cpu")
    case = random_format_case("diffkv", 0, release="0.11.2", num_splits=None)
    with pytest.raises((Unsupported, InvalidCase), match="diffkv"):
        lab.run(case)


def test_a_release_without_the_argument_is_unsupported():
    case = Case(
        op="unified_attention",
        backend="vllm",
        op_argument="tensor_descriptors",
        query_lens=(3,),
        ctx_lens=(4,),
    )
    with pytest.raises(Unsupported, match="op_argument must not be tensor_descriptors"):
        pass_argument(case, {"q": None}, {"q", "k"})
    plain = dataclasses.replace(case, op_argument=NONE)
    assert pass_argument(plain, {"q": None}, {"q"}).arguments == {"q": None}


@pytest.mark.releases
def test_a_gpu_gets_the_arguments_but_not_the_fp8_format_of_another_vendor(backend, monkeypatch):
    """The hostile Cases of a GPU by NVIDIA; nothing runs."""
    monkeypatch.setattr(type(backend), "device", property(lambda self: "cuda"))
    backend = dataclasses.replace(backend, requested_device="cuda")
    found = cases(backend, "unified_attention")
    assert {case.op_argument for case in found} == {
        name for name, one in OP_ARGUMENTS.items() if "unified_attention" in one.ops
    }
    assert {case.platform for case in found} == {"sm_90"}
    case = next(one for one in found if one.op_argument == "fp8_query")
    backend.check(case)
    with refused("platform"):
        backend.check(case.replace(platform="gfx942"))
    backend.check(case.replace(platform="gfx942", op_argument=NONE, kv_cache_dtype="auto"))


# Cache writes in another format as Cases of check: they agree with 0.33.0, and planted faults are found.


INT4 = "int4_per_token_head"
WRITE_FORMATS = ("int8_per_token_head", "fp8_per_token_head", INT4, "diffkv")


def case_of(name, seed=0):
    """Return a small write: context in the cache, new tokens of two sequences."""
    fields = {"query_lens": (3, 9), "ctx_lens": (18, 0), "num_heads": 4, "num_queries_per_kv": 2}
    fields |= {"head_size": 32, "distribution": "normal", "empty_slots": "nan", "stage": "sound"}
    return Case(op=WRITE, backend="vllm", op_argument=name, seed=seed, fill=None, **fields)


@pytest.mark.releases
@pytest.mark.parametrize("name", WRITE_FORMATS)
def test_a_release_without_the_function_of_a_write_is_unsupported(name):
    lab = Lab(source=of_release("0.11.2").path, device="cpu")
    with refused("op_argument", match=r"no (function|argument)"):
        lab.run(dataclasses.replace(case_of(name), release="0.11.2"))


@pytest.mark.releases
def test_check_has_a_write_of_each_format(backend):
    names = [case.op_argument for case in hostile_cases(backend, WRITE, "sm_90", DEFAULT_CASES, 0)]
    assert set(WRITE_FORMATS) <= set(names)


@pytest.mark.releases
@pytest.mark.parametrize("name", WRITE_FORMATS)
def test_random_data_agree(backend, name):
    lab = Lab(source=backend.path, device="cpu")
    for seed in range(5):
        assert lab.run(case_of(name, seed)).status == "match", seed
    plain = case_of(name).replace(op_argument="none")
    assert not lab.reference(plain).equal(lab.reference(case_of(name)))


def _caches_exchanged(made):
    swap = {"k_scale_cache": "v_scale_cache", "v_scale_cache": "k_scale_cache"}
    return {name: made.arguments[swap.get(name, name)] for name in made.arguments}


def _slots_shifted(made):
    return {**made.arguments, "slot_mapping": made.arguments["slot_mapping"].roll(1)}


def _larger_keys(made):
    return {**made.arguments, "key": made.arguments["key"] * 1.02}


def _exchange_nibbles(arguments):
    cache = arguments["value_cache"]
    cache.copy_((cache >> 4) | (cache << 4))


def _lose_zero_points(arguments):
    bits = arguments["k_scale_cache"].view(torch.int32)
    bits &= ~0xF


@pytest.mark.releases
@pytest.mark.parametrize("fault", [_exchange_nibbles, _lose_zero_points])
def test_wrong_bytes_of_int4_are_found(backend, monkeypatch, fault):
    """The bytes change after the write."""
    make = op_arguments._MAKERS[INT4]

    def faulty(case, given):
        made = make(case, given)

        def finish(output):
            fault(made.arguments)
            made.finish(output)

        return dataclasses.replace(made, finish=finish)

    monkeypatch.setitem(op_arguments._MAKERS, INT4, faulty)
    (found,) = check_case(Lab(source=backend.path, device="cpu"), backend, case_of(INT4))
    assert (found.kind, found.diagnosis) == ("wrong_bytes", "own slot")


@pytest.mark.releases
def test_the_bound_of_int4_admits_few_numbers():
    """Under the interpreter next to none is as near to another one; a step is a scale."""
    tokens = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(0)).half()
    bound = int4_write_bound(tokens, is_native=False)
    steps = bound / int4_scale(pack_int4(tokens)[1])[..., None]
    assert float((steps > 0.1).double().mean()) < 0.01
    assert float(steps.max()) < 1.1
    assert bool((int4_write_bound(tokens, is_native=True) >= bound).all())


@pytest.mark.releases
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_bound_admits_the_neighbour_of_a_number(dtype):
    """A number with another last bit of its scale may round to the next number of the dtype."""
    case = case_of("fp8_per_token_head").replace(dtype=dtype)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randn(100, 2, 64, generator=draw).to(FORMATS_OF_ELEMENTS[dtype].dtype)
    halves = [stored_numbers(case, half) for half in tokens.split(32, -1)]
    right = torch.cat([scaled_numbers(case, *half) for half in halves], -1).to(tokens.dtype)
    step = torch.nextafter(right, torch.full_like(right, torch.inf)).double() - right.double()
    bound = write_bound(case, lambda: tokens)
    near = step <= 1.01 * bound.double()  # the bound is that of the number before it was rounded
    assert bool(near[right > 0].all())
    assert float(bound.max()) < 1.0


@pytest.mark.releases
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in WRITE_FORMATS for fault in (_slots_shifted, _larger_keys)),
        ("int8_per_token_head", _caches_exchanged),
        ("fp8_per_token_head", _caches_exchanged),
        (INT4, _caches_exchanged),
    ],
)
def test_a_planted_fault_is_found(backend, monkeypatch, name, fault):
    make = op_arguments._MAKERS[name]

    def faulty(case, given):
        made = make(case, given)
        return dataclasses.replace(made, arguments=fault(made))

    monkeypatch.setitem(op_arguments._MAKERS, name, faulty)
    (found,) = check_case(Lab(source=backend.path, device="cpu"), backend, case_of(name))
    assert (found.kind, found.diagnosis) == ("wrong_bytes", "own slot")
