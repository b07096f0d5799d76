"""Products that processes share as files: the bits of a new one, made once, and never a reason to fail."""

import errno
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.cases import hostile

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.pytest_id import vllm_test_ids
from attnlab.checker import matrix
from attnlab.checker.matrix import MatrixJob
from attnlab.kernels.model import ModelBackend
from attnlab.lab import products
from attnlab.lab.lab import Lab, drawing_ahead
from attnlab.lab.products import (
    FOLDER_VARIABLE,
    SharedProducts,
    drop_products,
    from_file,
    shared_folder,
    sharing_between_processes,
)
from attnlab.tasks.task import InProcess, Task

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files are shared on POSIX only")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Return a folder in which this process shares every product, however quickly it is made."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(products, "_WORTHWHILE_S", -1.0)
    return tmp_path


def test_a_shared_product_has_the_bits_of_a_new_one(folder):
    """A second Lab takes batch, reference and prefill rows from files, and finds the same."""
    case = hostile()
    first, second = Lab().run(case), Lab().run(case)
    assert not {"batch", "reference", "prefill"} & {*first.shared}
    assert {"batch", "reference", "prefill"} <= {*second.shared}
    assert first.output.view(torch.int16).equal(second.output.view(torch.int16))
    assert first.errors.error.equal(second.errors.error)
    assert Lab().reference(case).equal(Lab().reference(case))


def test_another_case_has_another_file(folder):
    """A key that differs in one field never finds the product of another."""
    case = hostile()
    drawn = [Lab().batch(case.replace(seed=seed)).query for seed in (1, 2)]
    assert not drawn[0].equal(drawn[1])


def test_a_change_stays_in_its_process(folder):
    """Writing to a mapped tensor does not reach the file."""
    case = hostile()
    Lab().batch(case)
    Lab().batch(case).query.fill_(7)
    assert not (Lab().batch(case).query == 7).any()


def _make_slowly(folder: Path, made: Path) -> None:
    def make() -> int:
        made.write_text(made.read_text() + "x" if made.exists() else "x")
        time.sleep(0.3)
        return 5

    assert from_file(folder / "product.pt", make)[0] == 5


def test_processes_make_a_product_once(tmp_path):
    """Of two processes that need a product at once, one makes it and the other waits."""
    started = [
        multiprocessing.get_context("fork").Process(
            target=_make_slowly, args=(tmp_path, tmp_path / "made")
        )
        for _ in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0]
    assert (tmp_path / "made").read_text() == "x"


def _disk_is_full(product: object, file: Path) -> None:
    file.write_bytes(b"a part of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fault", ["no folder", "full disk", "broken file"])
def test_without_files_the_product_is_made(folder, fault, monkeypatch):
    """A folder that is gone, a full disk and a broken file cost time only."""
    file = folder / "product.pt"
    if fault == "no folder":
        file = folder / "gone" / "product.pt"
    if fault == "full disk":
        monkeypatch.setattr(torch, "save", _disk_is_full)
    if fault == "broken file":
        file.write_bytes(b"PK not a product")
    assert from_file(file, lambda: 3) == (3, False)
    assert not [*folder.glob("*.part")]


def test_a_folder_of_others_is_not_used(folder):
    """The files are pickles: a folder that others can write to, or that is gone, is ignored."""
    assert shared_folder() == folder
    folder.chmod(0o777)
    assert shared_folder() is None
    folder.chmod(0o700)
    folder.rmdir()
    assert shared_folder() is None


def test_the_folder_ends_with_the_run():
    """The environment of a run names a private folder, which is removed at the end."""
    with sharing_between_processes() as environment:
        folder = Path(environment[FOLDER_VARIABLE])
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


# Batches that are drawn in the background change no result, and threads make a shared product once.


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
