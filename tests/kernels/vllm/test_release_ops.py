"""The op files of releases, read from the wheels of a package index on this machine."""

import os
from pathlib import Path

import pytest
from helpers.index import OP_FILE, serving, write_wheel

from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.kernels.vllm import source
from attnlab.kernels.vllm.source import find_source
from attnlab.library.op import Package, package_of

FILLER = os.urandom(1 << 20)  # cannot be compressed


@pytest.fixture
def index_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of wheels; pip and the cache know nothing else."""
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "index"
    folder.mkdir()
    for version in ("0.10.0", "0.9.2", "0.10.1.1", "0.9.10", "0.11.0rc1", "0.11.0"):
        write_wheel(folder, version, f"VERSION = {version!r}\n", FILLER)
    source._finder.cache_clear()
    source._packages.cache_clear()
    return folder


def test_releases_are_sorted_by_number(index_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9.10 follows 0.9.2, a fourth number counts, and release candidates are left out."""
    with serving(index_folder) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        found = source.releases_between("0.9.2", "0.11.0")
        assert found == ["0.9.2", "0.9.10", "0.10.0", "0.10.1.1", "0.11.0"]
        assert source.releases_between("0.9.10", "0.10.0") == ["0.9.10", "0.10.0"]
        with pytest.raises(InvalidCase) as caught:
            source.releases_between("0.9.2", "0.9.3")
        assert caught.value.field == "release"


def test_only_the_op_files_are_downloaded(
    index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than a tenth of the wheel; a second call downloads nothing."""
    with serving(index_folder) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        folder = source.fetch_ops("0.10.1.1")
        assert 0 < index.sent < len(FILLER) / 10
        sent = index.sent
        assert source.fetch_ops("0.10.1.1") == folder
        assert index.sent == sent
    assert (folder / OP_FILE).read_text() == "VERSION = '0.10.1.1'\n"
    assert find_source(folder).version == "0.10.1.1"
    assert not list(folder.rglob("*.so"))


def test_ops_of_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are beside those of vLLM; the rules of vLLM's releases are not for them."""
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))
    package, file = package_of("sglang"), "sglang/kernels/ops/attention/merge_state.py"
    write_wheel(tmp_path, "0.5.23", "", FILLER, file)
    with serving(tmp_path) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        assert source.releases_between("0.5.23", "0.5.23", package) == ["0.5.23"]
        folder = source.fetch_ops("0.5.23", package)
        assert 0 < index.sent < len(FILLER)
    assert (folder / file).is_file()
    assert source.source_path("0.5.23", package) == folder
    found = find_source(folder, package)
    assert (found.version, found.rules) == ("0.5.23", None)
    with pytest.raises(InvalidCase, match=r"run attnlab fetch 0\.5\.23$"):
        source.source_path("0.5.23")


def test_without_range_requests_pip_downloads_the_wheel(
    index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op files are the same; the wheel is kept."""
    called = []

    def fetch(version: str, package: Package) -> Path:
        called.append(version)
        return index_folder / f"vllm-{version}-cp38-abi3-manylinux1_x86_64.whl"

    monkeypatch.setattr(source, "fetch", fetch)
    with serving(index_folder, ranges=False) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        folder = source.fetch_ops("0.10.0")
    assert called == ["0.10.0"]
    assert (folder / OP_FILE).is_file()


def test_a_missing_release_and_a_missing_index_are_one_line(
    index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left in the cache."""
    with serving(index_folder) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        with pytest.raises(InvalidCase):
            source.fetch_ops("0.9.3")
    with pytest.raises(AttnLabError) as caught:  # the server is gone
        source.fetch_ops("0.9.2")
    assert "\n" not in str(caught.value)
    assert not list((index_folder.parent / "cache").rglob("*.py"))
