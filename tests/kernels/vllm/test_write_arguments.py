"""Cache writes in another format as Cases of check: they agree with 0.33.0, and planted faults are found."""

import dataclasses

import pytest
from helpers.sources import of_release

from attnlab.case.case import Case
from attnlab.case.ops import WRITE
from attnlab.checker.case_check import check_case
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels import find_backend
from attnlab.kernels.vllm import op_arguments
from attnlab.lab.lab import Lab

pytestmark = pytest.mark.releases
FORMATS = ("int8_per_token_head", "fp8_per_token_head", "diffkv")


@pytest.fixture(scope="module")
def backend():
    """Provide the ops of 0.33.0."""
    return find_backend("vllm", of_release("0.33.0").path, "cpu")


def case_of(name, seed=0):
    """Return a small write: context in the cache, new tokens of two sequences."""
    fields = {"query_lens": (3, 9), "ctx_lens": (18, 0), "num_heads": 4, "num_queries_per_kv": 2}
    fields |= {"head_size": 32, "distribution": "normal", "empty_slots": "nan", "stage": "sound"}
    return Case(op=WRITE, backend="vllm", op_argument=name, seed=seed, fill=None, **fields)


def test_check_has_a_write_of_each_format(backend):
    names = [case.op_argument for case in hostile_cases(backend, WRITE, "sm_90", 31, 0)]
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


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in FORMATS for fault in (_slots_shifted, _larger_keys)),
        ("int8_per_token_head", _caches_exchanged),
        ("fp8_per_token_head", _caches_exchanged),
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
