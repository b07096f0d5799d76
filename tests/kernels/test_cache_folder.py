"""The cache folder is private, and what others could have written is not executed."""

import os
import stat
from pathlib import Path

import pytest

from attnlab.case.errors import Unavailable
from attnlab.kernels import cache_folder as cache
from attnlab.kernels.rocm import device as build
from attnlab.kernels.vllm import source


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache folder and a umask of 0."""
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))
    umask = os.umask(0)
    yield tmp_path / "cache"
    os.umask(umask)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_private(own_cache: Path) -> None:
    folder = cache.private_folder("releases", "0.0.0")
    assert [mode(p) for p in (own_cache, own_cache / "releases", folder)] == [0o700] * 3


def test_files_are_private_and_the_umask_is_restored(own_cache: Path) -> None:
    with cache.writing():
        (cache.private_folder() / "file").write_text("x")
        os.umask(0)  # as unearth does while it unpacks
    assert mode(own_cache / "file") == 0o600
    assert os.umask(0) == 0


def test_a_download_leaves_the_umask_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    os.umask(0o027)

    def download(version: str, folder: Path) -> Path:
        os.umask(0)
        (folder / "fetched").write_text("x")
        return folder / "fetched"

    monkeypatch.setattr(source, "_sdist_download", download)
    assert mode(source.fetch_sdist("0.1.0")) == 0o600
    assert os.umask(0) == 0o027


@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_folder_that_others_can_write_is_refused(own_cache: Path, bits: int) -> None:
    (own_cache / "hip").mkdir(parents=True)
    own_cache.chmod(0o700)
    (own_cache / "hip").chmod(0o700 | bits)
    with pytest.raises(Unavailable, match="writable only by you"):
        cache.private_folder("hip")


def test_a_library_that_others_can_write_is_not_loaded(own_cache: Path) -> None:
    text = 'extern "C" int answer() { return 42; }\n'
    library = build.build("answer", text)
    assert mode(library) & 0o022 == 0
    assert build.build("answer", text) == library
    library.chmod(0o777)
    with pytest.raises(Unavailable, match=str(library)):
        build.build("answer", text)


@pytest.mark.parametrize("name", ["/proc", "/dev/null"])
def test_an_unusable_folder_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("ATTNLAB_CACHE", name)
    with pytest.raises(Unavailable, match="cannot be used") as caught:
        cache.private_folder("releases")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line() -> None:
    with pytest.raises(Unavailable, match="No space left"), cache.writing():
        Path("/dev/full").write_bytes(b"x" * (1 << 20))
