"""Backend cuda: Cases of the cache write run vLLM's CUDA source, and a planted fault is found."""

import shutil

import pytest
from helpers.cases import refused
from helpers.fake_ops import made
from helpers.sources import sdist

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.case.ops import WRITE
from attnlab.checker.case_run import source_digest
from attnlab.checker.check import backend_of
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels.cuda.backend import CudaBackend
from attnlab.lab.lab import Lab

CASE = Case(
    op=WRITE,
    backend="cuda",
    platform="sm_90",
    query_lens=(3, 1),
    ctx_lens=(5, 20),
    num_heads=4,
    kv_layout="HND",
)


@pytest.mark.releases
def test_hostile_cases_match():
    source = sdist("0.33.0")
    cases = list(hostile_cases(CudaBackend(path=source.path), WRITE, "sm_90", 12, 0))
    assert {case.backend for case in cases} == {"cuda"}
    assert {case.kv_layout for case in cases} > {"contiguous"}
    lab = Lab(source=source.path)
    assert [lab.run(case).status for case in cases] == ["match"] * len(cases)


@pytest.mark.releases
def test_a_fault_in_the_source_is_found_and_changes_the_digest(tmp_path):
    root = tmp_path / "vllm-source"
    shutil.copytree(sdist("0.33.0").root, root)
    file = root / "csrc/cache_kernels.cu"
    before = "key_dst + static_cast<int64_t>(head) * head_stride;"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, "key_dst;"))
    assert Lab(source=root).run(CASE).status == "mismatch"
    digests = {
        source_digest(backend_of(source=one, csrc=True)) for one in (root, sdist("0.33.0").path)
    }
    assert len(digests) == 2


@pytest.mark.releases
def test_a_platform_without_cuda_is_refused():
    with refused("platform"):
        Lab(source=sdist("0.33.0").path).run(CASE.replace(platform="gfx942"))


def test_a_source_without_csrc_is_unavailable(tmp_path):
    made(tmp_path, one="")
    with pytest.raises(Unavailable, match=r"does not contain csrc/cache_kernels\.cu"):
        Lab(source=tmp_path).run(CASE)


@pytest.mark.parametrize(
    ("given", "field"), [({}, "csrc"), ({"source": "x", "device": "cuda"}, "device")]
)
def test_csrc_needs_a_source_and_no_gpu(given, field):
    with refused(field):
        backend_of(csrc=True, **given)


def test_other_ops_are_refused():
    with refused("backend"):
        Case(backend="cuda", platform="sm_90")
