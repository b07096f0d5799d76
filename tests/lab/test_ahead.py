"""Batches that are drawn in the background change no result, and threads make a shared product once."""

import threading
import time

import pytest
import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.pytest_id import vllm_test_ids
from attnlab.checker import matrix
from attnlab.checker.matrix import MatrixJob
from attnlab.kernels.model import ModelBackend
from attnlab.lab.lab import Lab, drawing_ahead
from attnlab.lab.products import SharedProducts, drop_products
from attnlab.tasks.task import InProcess, Task

SMALL = {"num_heads": 2, "num_queries_per_kv": 2, "query_lens": (1, 17), "ctx_lens": (20, 3)}
CASES = [Case(seed=seed, stage=stage, **SMALL) for seed in range(5) for stage in ("sound", "int64")]


def test_results_are_the_same_and_batches_are_drawn_in_another_thread(monkeypatch):
    drawn = {}
    batch = Lab.batch

    def noted(lab, case):
        if lab is ahead:
            drawn.setdefault(case.seed, threading.current_thread().name)
        return batch(lab, case)

    monkeypatch.setattr(Lab, "batch", noted)
    threads, ahead, alone = torch.get_num_threads(), Lab(keep=8), Lab(keep=8)
    with drawing_ahead(ahead, CASES) as coming:
        for case in coming:
            time.sleep(0.02)  # the other thread is first
            found, expected = ahead.run(case), alone.run(case)
            assert found.verdict == expected.verdict
            assert torch.equal(found.call.output, expected.call.output)
    assert set(drawn) == set(range(5))
    assert "attnlab-drawing" in drawn.values()
    assert torch.get_num_threads() == threads


def test_at_most_two_batches_wait():
    lab = Lab(keep=8)
    with drawing_ahead(lab, CASES) as coming:
        next(coming)
        time.sleep(0.3)
        assert lab.shared.count("batch") == 2


def test_an_error_of_a_draw_is_raised_by_its_run(monkeypatch):
    def failing(lab, case):
        raise AttnLabError("no batch")

    monkeypatch.setattr(Lab, "batch", failing)
    with drawing_ahead(Lab(keep=8), CASES) as coming:
        assert list(coming) == CASES


def test_threads_make_a_product_once_and_other_products_meanwhile():
    store, made, begun = SharedProducts(keep=4, folder=None), [], threading.Event()

    def slow():
        made.append("slow")
        begun.set()
        assert other.wait(10)  # made while this one is not ready
        return "slow"

    other, found = threading.Event(), []
    askers = [
        threading.Thread(target=lambda: found.append(store.get("kind", 1, slow))) for _ in range(2)
    ]
    for asker in askers:
        asker.start()
    assert begun.wait(10)
    assert store.get("kind", 2, lambda: "quick") == ("quick", False)
    other.set()
    for asker in askers:
        asker.join()
    assert made == ["slow"]
    assert sorted(found) == [("slow", False), ("slow", True)]


def test_a_matrix_on_a_gpu_prepares_its_kernels_and_draws_ahead(monkeypatch):
    ids = [name for name in vllm_test_ids() if "cuda:0-auto-dtype0-24" in name][:2]
    small = {"draw_max_query_len": 8, "draw_max_ctx_len": 8, "platform": "gfx942", "stage": "sound"}
    compiled = []
    monkeypatch.setattr(ModelBackend, "source", None, raising=False)
    monkeypatch.setattr(matrix, "VllmBackend", ModelBackend)  # as on a GPU
    monkeypatch.setattr(matrix, "precompile", lambda cases, source: compiled.append(len(cases)))
    job = MatrixJob(changes=small, device="cuda", lab_device="cpu")
    tasks = [Task(key=name, payload={"ids": [name]}) for name in [*ids, "test_x[not-an-id]"]]
    outcomes = []
    with InProcess() as engine:
        engine.run(job, tasks, outcomes.append)
    statuses = [outcome.verdict["rows"][0]["status"] for outcome in outcomes]
    assert statuses == ["match", "match", "not run"]
    assert compiled == [2]


def test_a_large_product_is_there_as_long_as_something_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnlab.lab.products._KEPT_BYTES", 100)
    store = SharedProducts(keep=2, folder=None)
    held = store.get("cache", 1, lambda: torch.zeros(100))[0]
    store.get("cache", 2, lambda: torch.zeros(100))
    assert store.count("cache") == 1
    assert store.get("cache", 1, lambda: torch.zeros(100))[0] is held
    assert not store.has("cache", 2)  # nothing held it
    small = SharedProducts(keep=2, folder=None)
    for key in (1, 2):
        small.get("cache", key, lambda: torch.zeros(2))
    assert small.count("cache") == 2


def test_all_stores_drop_what_nothing_else_holds() -> None:
    """A product that somebody holds stays shared; another one is made again."""
    store, made = SharedProducts(keep=2, folder=None), []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.zeros(4)

    held = store.get("a", 1, make)[0]
    store.get("b", 1, make)
    drop_products()
    assert (store.count("a"), store.count("b")) == (0, 0)
    assert store.get("a", 1, make)[0] is held
    assert store.get("b", 1, make)[1] is False
    assert len(made) == 3
