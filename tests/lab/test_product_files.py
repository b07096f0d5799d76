"""Products that processes share as files: the bits of a new one, made once, and never a reason to fail."""

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from helpers.cases import hostile

from attnlab.lab import products
from attnlab.lab.lab import Lab
from attnlab.lab.products import (
    FOLDER_VARIABLE,
    from_file,
    shared_folder,
    sharing_between_processes,
)

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
