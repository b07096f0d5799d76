"""Sources: archives and folders are read, and anything else is rejected in one line."""

import io
import os
import re
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from helpers.cases import refused

from attnlab.case.errors import AttnLabError, InvalidCase, Unavailable
from attnlab.cli.main import main
from attnlab.kernels.vllm import source
from attnlab.kernels.vllm.loader import Loader
from attnlab.kernels.vllm.source import Source, fetch, find_source
from attnlab.library.op import Package, package_of

OP_FILE = "vllm/attention/ops/prefix_prefill.py"


def write_wheel(
    folder: Path, version: str, text: str, filler: bytes = b"", op_file: str = OP_FILE
) -> Path:
    """Write a wheel of vLLM, or of the package of another op file, with that file, and one that is no op."""
    name = op_file.partition("/")[0]
    path = folder / f"{name}-{version}-cp38-abi3-manylinux1_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/_C.abi3.so", filler)
        wheel.writestr(op_file, text)
        metadata = f"Name: {name}\nVersion: {version}\n"
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
    return path


class Index(ThreadingHTTPServer):
    """Serves the wheels of a folder; ``sent`` counts the bytes of wheels."""

    def __init__(self, folder: Path, ranges: bool) -> None:
        self.folder, self.ranges, self.sent = folder, ranges, 0
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """Return the address of the index, for pip."""
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if not name:
            links = "".join(
                f'<a href="/{p.name}">{p.name}</a>' for p in self.server.folder.iterdir()
            )
            self._answer(200, links.encode(), {"Content-Type": "text/html"})
            return
        data = (self.server.folder / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None or not self.server.ranges:
            self._answer(200, data, {})
        else:
            first = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
            last = min(int(asked[2]), len(data) - 1) if asked[1] and asked[2] else len(data) - 1
            header = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            self._answer(206, data[first : last + 1], header)

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.server.sent += len(data) if "Content-Type" not in headers else 0
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@contextmanager
def serving(folder: Path, ranges: bool = True) -> Iterator[Index]:
    """Yield an index that serves the wheels of a folder."""
    with Index(folder, ranges) as index:
        threading.Thread(target=index.serve_forever, daemon=True).start()
        try:
            yield index
        finally:
            index.shutdown()


OP = """
from vllm.platforms import current_platform
import vllm.envs as envs
from vllm.missing import thing
from .other import NUMBER
WHO = current_platform

def late():
    from vllm.platforms.rocm import answer
    return answer

def uses():
    return thing()
"""
FILES = {
    "vllm/attention/ops/one.py": OP,
    "vllm/attention/ops/other.py": "NUMBER = 7\n",
    "vllm/attention/ops/broken.py": "from .other import NUMBER\nraise ValueError('no such GPU')\n",
    "vllm/attention/layer.py": "raise RuntimeError\n",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache folder of the test."""
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def checkout(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "vllm" / "_version.py").write_text(
        "__version__ = version = '0.11.1'\n__version_tuple__ = (0, 11, 1, 'x')\n"
    )
    return folder


def wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, text in FILES.items():
            file.writestr(name, text)
        file.writestr("vllm-0.10.0.dist-info/METADATA", "Name: vllm\nVersion: 0.10.0\n")
    return path


def sdist(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, text in (*FILES.items(), ("PKG-INFO", "Name: vllm\nVersion: 0.9.9\n")):
            info = tarfile.TarInfo(f"vllm-0.9.9/{name}")
            info.size = len(text)
            file.addfile(info, io.BytesIO(text.encode()))
    return path


def test_a_crafted_archive_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    """Too many bytes or files in a small wheel or sdist."""
    folder = "vllm/v1/attention/ops"
    with zipfile.ZipFile(tmp_path / "bytes.whl", "w", zipfile.ZIP_DEFLATED) as file:
        for i in range(3):
            file.writestr(f"{folder}/big_{i}.py", b"#" * (20 << 20))
    with zipfile.ZipFile(tmp_path / "files.whl", "w") as file:
        for i in range(600):
            file.writestr(f"{folder}/op_{i}.py", "")
    with tarfile.open(tmp_path / "bytes.tar.gz", "w:gz") as file:
        info = tarfile.TarInfo(f"vllm-0.9.9/{folder}/big.py")
        info.size = 40 << 20
        file.addfile(info, io.BytesIO(b"#" * info.size))
    for name in ("bytes.whl", "files.whl", "bytes.tar.gz"):
        with refused("source", match="exceed"):
            find_source(tmp_path / name)
        assert not [path for path in cache.rglob("*") if path.is_file()]


def test_each_kind_is_read(tmp_path: Path, cache: Path) -> None:
    """A checkout is read in place; of an archive only the ops are unpacked, once."""
    found = [
        find_source(checkout(tmp_path / "tree")),
        find_source(tmp_path / "tree" / "vllm"),
        find_source(wheel(tmp_path / "vllm.whl")),
        find_source(sdist(tmp_path / "vllm.tar.gz")),
    ]
    assert [(s.kind, s.version, s.rules) for s in found] == [
        ("checkout", "0.11.1", "0.11.2"),
        ("checkout", "0.11.1", "0.11.2"),
        ("wheel", "0.10.0", "0.11.2"),
        ("sdist", "0.9.9", "0.11.2"),
    ]
    for one in found:
        assert one.op_file("other").read_text() == "NUMBER = 7\n"
        with pytest.raises(Unavailable, match="has no attention op unified"):
            one.op_file("unified")
    assert found[0].root == found[1].root == tmp_path / "tree"
    assert len(list(cache.rglob("other.py"))) == 2
    assert list(cache.rglob("layer.py")) == []
    assert find_source(tmp_path / "vllm.whl") == found[2]
    assert len(list((cache / "sources").iterdir())) == 2


def test_rules_of_releases() -> None:
    """Releases up to 0.11 use the older rules, later ones the newer; an unknown version uses the Case's."""
    made = {"kind": "wheel", "path": Path("x"), "root": Path("x")}
    rules = {v: Source(**made, version=v).rules for v in ("0.9.2", "0.11.2", "0.12.0", "unknown")}
    assert rules == {"0.9.2": "0.11.2", "0.11.2": "0.11.2", "0.12.0": "0.33.0", "unknown": None}


def test_what_is_no_vllm_is_refused(tmp_path: Path, cache: Path) -> None:
    """The error is one line, and nothing remains in the cache."""
    (tmp_path / "text").write_text("no archive")
    (tmp_path / "cut.whl").write_bytes(wheel(tmp_path / "vllm.whl").read_bytes()[:100])
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as file:
        file.writestr("numpy/__init__.py", "")
    for name in ("text", "cut.whl", "other.whl", "nowhere", "."):
        with pytest.raises(InvalidCase, match=r"^source must be") as caught:
            find_source(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not any((cache / "sources").iterdir())


def test_command_line_refuses_a_wrong_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong source exits with 2 and one line that names the field."""
    path = str(wheel(tmp_path / "vllm.whl"))
    small = ["--num-heads", "2", "--head-size", "16", "--query-lens", "1", "--ctx-lens", "3"]
    for argv, words in (
        (["run", "--backend", "vllm", "--source", str(tmp_path / "no.whl")], "that exists"),
        (
            ["run", "--backend", "model", "--source", path],
            "source must not be given with backend model",
        ),
        (["run", "--source", path], "release must be 0.11.2"),
        (
            ["run", "--backend", "vllm", "--source", path, "--kv-head-range", "0:9"],
            "kv_head_range must be at most",
        ),
        (["run", "--kv-head-range", "0:1"], "kv_head_range must be none"),
    ):
        assert main([*argv, *(small if argv[0] == "run" else [])]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert words in printed.err
        assert printed.err.count("\n") == 1


@pytest.mark.parametrize("version", ["", "latest", "0.11.2; rm", "==0.1", "../0.1.0"])
def test_fetch_refuses_what_is_no_version(version: str) -> None:
    """Only a version may reach pip's command line."""
    with pytest.raises(InvalidCase, match="release must be a version"):
        fetch(version)


def loader(tmp_path: Path) -> Loader:
    platforms, rocm = ModuleType("vllm.platforms"), ModuleType("vllm.platforms.rocm")
    platforms.current_platform, rocm.answer = "simulated", 42  # type: ignore[attr-defined]
    stubs = {module.__name__: module for module in (platforms, rocm)}
    return Loader(find_source(checkout(tmp_path / "tree")), stubs)


def test_ops_load_alone(tmp_path: Path) -> None:
    """Early and late imports of vLLM come from the table; sys.modules and the disk do not change."""
    before = set(sys.modules)
    module = loader(tmp_path).load("one")
    assert (module.WHO, module.NUMBER, module.late()) == ("simulated", 7, 42)
    with pytest.raises(Unavailable, match=r"vllm\.missing\.thing"):
        module.uses()
    assert {name for name in set(sys.modules) - before if name.startswith("vllm")} == set()
    assert not list(tmp_path.rglob("__pycache__"))


def test_an_op_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """The reason is raised each time; modules that it imported stay loadable."""
    ops = loader(tmp_path)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"broken of vLLM 0\.11\.1 .*: ValueError"):
            ops.load("broken")
    assert ops.load("other").NUMBER == 7


# The op files of releases, read from the wheels of a package index on this machine.


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
        with refused("release"):
            source.releases_between("0.9.2", "0.9.3")


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
