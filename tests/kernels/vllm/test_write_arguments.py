"""Cache writes in another format as Cases of check: they agree with 0.33.0, and planted faults are found."""

import dataclasses

import pytest
import torch
from helpers.sources import of_release

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import WRITE
from attnlab.checker.case_check import check_case
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.variants import DEFAULT_CASES
from attnlab.kernels import find_backend
from attnlab.kernels.vllm import op_arguments
from attnlab.lab.cache_write import int4_write_bound, write_bound
from attnlab.lab.lab import Lab
from attnlab.tensors.formats import FORMATS as FORMATS_OF_ELEMENTS
from attnlab.tensors.formats import int4_scale, pack_int4
from attnlab.tensors.quantised import scaled_numbers, stored_numbers

pytestmark = pytest.mark.releases
INT4 = "int4_per_token_head"
FORMATS = ("int8_per_token_head", "fp8_per_token_head", INT4, "diffkv")


@pytest.fixture(scope="module")
def backend():
    """Provide the ops of 0.33.0."""
    return find_backend("vllm", of_release("0.33.0").path, "cpu")


def case_of(name, seed=0):
    """Return a small write: context in the cache, new tokens of two sequences."""
    fields = {"query_lens": (3, 9), "ctx_lens": (18, 0), "num_heads": 4, "num_queries_per_kv": 2}
    fields |= {"head_size": 32, "distribution": "normal", "empty_slots": "nan", "stage": "sound"}
    return Case(op=WRITE, backend="vllm", op_argument=name, seed=seed, fill=None, **fields)


@pytest.mark.parametrize("name", FORMATS)
def test_a_release_without_the_function_of_a_write_is_unsupported(name):
    lab = Lab(source=of_release("0.11.2").path, device="cpu")
    with pytest.raises(InvalidCase, match=r"no (function|argument)") as caught:
        lab.run(dataclasses.replace(case_of(name), release="0.11.2"))
    assert caught.value.field == "op_argument"


def test_check_has_a_write_of_each_format(backend):
    names = [case.op_argument for case in hostile_cases(backend, WRITE, "sm_90", DEFAULT_CASES, 0)]
    assert set(FORMATS) <= set(names)


@pytest.mark.parametrize("name", FORMATS)
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


def test_the_bound_of_int4_admits_few_numbers():
    """Under the interpreter next to none is as near to another one; a step is a scale."""
    tokens = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(0)).half()
    bound = int4_write_bound(tokens, is_native=False)
    scale = pack_int4(tokens)[1]
    steps = bound / int4_scale(scale)[..., None]
    assert float((steps > 0.1).double().mean()) < 0.01
    assert float(steps.max()) < 1.1
    native = int4_write_bound(tokens, is_native=True)
    assert bool((native >= bound).all())


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


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in FORMATS for fault in (_slots_shifted, _larger_keys)),
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
    lab = Lab(source=backend.path, device="cpu")
    (found,) = check_case(lab, backend, case_of(name))
    assert (found.kind, found.diagnosis) == ("wrong_bytes", "own slot")
