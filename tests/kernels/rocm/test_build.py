"""Building the source: missing or unexpected parts give one line, and no partial file remains."""

import shutil
from pathlib import Path

import pytest
from helpers.cases import call_of, hostile
from helpers.commands import error_line
from helpers.fake_ops import made
from helpers.sources import sdist

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import Target
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.rocm import device as build
from attnlab.kernels.rocm.device import Op
from attnlab.kernels.vllm import source as fetching
from attnlab.kernels.vllm.source import Source, find_source

KERNEL_FILES = ("attention.cu", "attention_kernels.cuh")


@pytest.fixture
def own(rocm: Source, tmp_path: Path) -> Source:
    """Provide a checkout with csrc/rocm's attention and one op."""
    shutil.copytree(rocm.root / "csrc", tmp_path / "vllm" / "csrc")
    made(tmp_path / "vllm", one="")
    return find_source(tmp_path / "vllm")


def kernel_file(source: Source) -> Path:
    return next(p for name in KERNEL_FILES if (p := source.root / "csrc/rocm" / name).is_file())


def run(source: Source) -> None:
    case = hostile(query_lens=(1,), ctx_lens=(3,))
    call, _ = call_of(case)
    rocm_source.run(call, Target.of(case), source)


def test_adaptation_keeps_every_line_where_it_is(rocm: Source) -> None:
    """The device code has the same lines as the file except the adapted ones; each adaptation has a
    reason."""
    text = kernel_file(rocm).read_text()
    adapted = build.adapt("attention.cu", text).split("\n")[1:]
    original = text.split("\n")
    assert len(adapted) == len(original)
    changed = sum(one != other for one, other in zip(adapted, original, strict=True))
    assert 0 < changed < len(original) / 30
    assert build.ADAPTATIONS
    assert all(change.why for change in build.ADAPTATIONS)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "__shared__ float shared_global_exp_sum;",
            "__shared__ my::type<3> sum;",
            "'__shared__'",
        ),
        ("v_max_f32_dpp", "v_min_i32_dpp", "v_…_dpp row_ror 4 times"),
        (
            "<<<grid, block, 0, stream>>>",
            "<<<grid, block, 64, stream>>>",
            "launches of the attention kernels 0 times",
        ),
        (
            "#define LAUNCH_CUSTOM_ATTENTION_MFMA16",
            "#define LAUNCH_16",
            "LAUNCH_CUSTOM_ATTENTION_MFMA16",
        ),
    ],
)
def test_an_unexpected_text_is_refused(own: Source, old: str, new: str, words: str) -> None:
    """The error names the file and the missing pattern."""
    file = kernel_file(own)
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(Unavailable, match=words) as caught:
        build.adapted(own.root)
    assert f"csrc/rocm/{file.name} is not as expected" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_compile_error_gives_the_compilers_first_error(own: Source) -> None:
    """The corrected text builds afterwards."""
    file = kernel_file(own)
    right = file.read_text()
    file.write_text(right.replace("enum class MFMAType {", "enum class MFMAType { F15 F14,", 1))
    with pytest.raises(
        Unavailable, match=r"cannot compile host: csrc/rocm/attention\w*.cuh?:\d+:\d+: error"
    ):
        run(own)
    file.write_text(right)
    rocm_source.op_of.cache_clear()
    run(own)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a compiler the error names the package; with a wrong $CXX it names the variable."""
    monkeypatch.setenv("PATH", str(tmp_path))
    build.find_compiler.cache_clear()
    try:
        with pytest.raises(
            Unavailable, match=r"install g\+\+ \(Debian, Ubuntu: apt-get install g\+\+"
        ):
            build.find_compiler(None)
        with pytest.raises(Unavailable, match="CXX must name a C\\+\\+ compiler, got 'nonesuch'"):
            build.find_compiler("nonesuch")
    finally:
        build.find_compiler.cache_clear()


def test_a_source_without_the_kernel_is_refused(tmp_path: Path, capsys) -> None:
    """A checkout without csrc: exit code 2 and one line."""
    made(tmp_path, one="")
    source = find_source(tmp_path)
    assert not build.has_source(source.root)
    with pytest.raises(Unavailable, match="fetch --sdist"):
        build.adapted(source.root)
    words = ["run", "--backend", "rocm", "--source", str(tmp_path)]
    line = error_line(capsys, [*words, "--query-lens", "1", "--ctx-lens", "3"])
    assert "does not contain csrc/rocm's attention" in line


def test_a_platform_that_is_not_emulated_is_refused() -> None:
    """Platforms with waves of 32 lanes are not emulated."""
    with pytest.raises(Unavailable, match="got gfx1100"):
        Op(root=Path(), platform=PLATFORMS["gfx1100"])


def test_checked_belongs_to_origin_rocm() -> None:
    """Other backends cannot trace reads, and rocm has no head range."""
    with pytest.raises(InvalidCase, match="trace_reads must be false with backend model"):
        Case(trace_reads=True)
    with pytest.raises(InvalidCase, match="kv_head_range must be none with backend rocm"):
        Case(backend="rocm", kv_head_range=(0, 1))


def test_the_native_op_is_taken_by_its_schema_only_where_it_is() -> None:
    """Without an AMD GPU the native op is unavailable."""
    if rocm_source.native() is not None:
        pytest.skip("this machine has the real op")
    case = hostile()
    call, _ = call_of(case)
    with pytest.raises(Unavailable, match="no AMD GPU"):
        rocm_source.run(call, Target.of(case), None)


def test_pips_settings_say_where_an_sdist_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment precedes the configuration; without either, pip's default is used."""
    listed = "global.index-url='https://one/simple'\nglobal.extra-index-url='https://a https://b'\n"
    said = {"config": listed, "download": "Base URL (default https://none/simple). This"}
    monkeypatch.setattr(fetching, "_pip", lambda *words: said[words[0]])
    found = fetching.pip_settings()
    assert found["index-url"] == ["https://one/simple"]
    assert found["extra-index-url"] == ["https://a", "https://b"]
    said["config"] += ":env:.index-url='https://two/simple'\n"
    assert fetching.pip_settings()["index-url"] == ["https://two/simple"]
    said["config"] = ""
    assert fetching.pip_settings()["index-url"] == ["https://none/simple"]


def test_an_index_that_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A failed download gives one line, and no partial file remains in the cache."""
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path))
    nowhere = {"index-url": ["http://127.0.0.1:9/simple"]}
    nowhere |= {name: [] for name in ("extra-index-url", "find-links", "trusted-host")}
    monkeypatch.setattr(fetching, "pip_settings", lambda: nowhere)
    with pytest.raises(Unavailable, match=r"vllm 0\.11\.2") as caught:
        fetching.fetch_sdist("0.11.2")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.tar.gz"))


def test_fetch_sdist_refuses_what_is_no_version() -> None:
    """fetch_sdist rejects what fetch rejects."""
    with pytest.raises(InvalidCase, match="release must be a version"):
        fetching.fetch_sdist("../0.11.2")


@pytest.mark.releases
def test_a_warm_cache_builds_nothing() -> None:
    """The same text, compiler and processor reuse the library."""
    source = sdist("0.33.0")
    run(source)
    steps: list[str] = []
    rocm_source.op_of.cache_clear()
    case = hostile(query_lens=(1,), ctx_lens=(3,))
    call, _ = call_of(case)
    rocm_source.run(call, Target.of(case), source, on_step=steps.append)
    assert steps == []
