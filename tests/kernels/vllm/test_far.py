"""Block offsets beyond 2^31 elements, in little memory: overflows are found, without false findings."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.faulty_labs import FaultyLab
from helpers.plugins import planted
from helpers.sources import needs_triton, of_release
from helpers.triton_example import EXAMPLE, TRITON
from helpers.upstream import script_outcome, written

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.platforms import PLATFORMS
from attnlab.checker import plan
from attnlab.checker import report as library
from attnlab.checker.case_check import check_case
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import hostile_cases
from attnlab.diagnosis.address_rules import memory_of
from attnlab.diagnosis.lines import locatable_case
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend
from attnlab.kernels.model import ModelBackend
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import in_one_buffer, to_flash, untouched


def far_case(backend: Backend, op: str) -> Case:
    """Return the hostile Case of an op with block offsets beyond 2^31 elements, shortened."""
    case = next(c for c in hostile_cases(backend, op, "sm_90", None, 0) if c.first_block)
    lens = (1, 1) if op == "decode_attention_fwd" else (5, 1)
    return case.replace(query_lens=lens, ctx_lens=(40, 30), num_blocks=None)


pytestmark = needs_triton

OPS = (
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "unified_attention",
    "decode_attention_fwd",
)
MEASURED = f"""
import sys
from pathlib import Path
from attnlab.case.case import Case
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab
from attnlab.checker.case_check import check_case
from attnlab.kernels import find_backend
{inspect.getsource(far_case)}
backend = find_backend("vllm", Path(sys.argv[1]), "cpu")
for op in sys.argv[2:]:
    check_case(Lab(source=Path(sys.argv[1]), device="cpu"), backend, far_case(backend, op))
lines = Path("/proc/self/status").read_text().splitlines()  # ru_maxrss includes the parent's memory
print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("op", OPS)
def test_a_diagnosis_copies_no_such_cache(op: str) -> None:
    """Rules do without it, and lines are located in a case without the unused blocks."""
    lab = FaultyLab(spoil=lambda case, call: call.output.fill_(7))
    case = far_case(ModelBackend(rules="0.33.0"), op)
    copied = {"key_cache", "value_cache"} & memory_of(lab.call(case)).keys()
    assert not copied or case.spec.cache_layout == "x-split"  # views of the cache as it is
    assert locatable_case(lab, case).first_block == 0


@pytest.mark.parametrize("op", OPS)
def test_offsets_are_beyond_the_limit_and_models_right(op: str) -> None:
    """Every used block begins beyond 2^31 elements in either layout, and the models read it."""
    backend, lab = ModelBackend(rules="0.33.0"), Lab()
    case = far_case(backend, op)
    call = lab.call(case)
    least = int(call.block_table.min())
    assert least >= case.first_block
    assert least * call.key_cache.stride(0) > 2**31
    assert least * call.value_cache.stride(0) > 2**31
    assert check_case(lab, backend, case) == []


def test_what_wraps_is_found(source: Source) -> None:
    """Only 0.11.2's split-KV decode multiplies slot and stride as int32."""
    backend = find_backend("vllm", source.path, "cpu")
    for op in OPS:
        lab = Lab(source=source.path, device="cpu")
        found = {one.kind: one for one in check_case(lab, backend, far_case(backend, op))}
        wraps = op == "decode_attention_fwd" and source.rules == "0.11.2"
        assert ("int32_wrap" in found) == wraps, op
        assert ("wrong_output" in found) == wraps, op
        if wraps:
            assert found["wrong_output"].diagnosis == "block offset beyond 2^31 elements"
            assert "triton_decode_attention.py" in found["int32_wrap"].evidence


def found_in(folder: Path, *changes: tuple[str, str]) -> dict[str, Finding]:
    """Check the example with changes, without a copy of the cache; return a finding of each kind."""
    text = f"{TRITON}\nmy_attention.large_caches = True\n"
    least = ("call.value_cache)", "call.value_cache, int(call.block_table.min()))")
    for old, new in (least, *changes):
        assert old in text
        text = text.replace(old, new)
    backend = planted(folder, text)
    case = far_case(backend, "unified_attention")
    return {one.kind: one for one in check_case(Lab(), backend, case)}


NARROW = ("first // BLOCK).to(tl.int64)", "first // BLOCK)")


def test_a_planted_int32_offset_is_found(tmp_path: Path) -> None:
    """The example is correct; without its cast to int64 it is not."""
    assert not found_in(tmp_path)
    assert {"int32_wrap", "wrong_output"} <= found_in(tmp_path, NARROW).keys()


def test_an_int32_offset_is_named_if_empty_slots_leak_too(tmp_path: Path) -> None:
    """The same Case with small block numbers is right only without NaN in the empty slots."""
    leak = ("value + at, mask=both,", "value + at, mask=d[None, :] < DIM,")
    wrong = found_in(tmp_path, NARROW, leak)["wrong_output"]
    assert wrong.diagnosis == "block offset beyond 2^31 elements"


def test_a_fault_beside_an_int32_offset_is_that_of_small_block_numbers(tmp_path: Path) -> None:
    """An output with both faults may fit the name of a third one."""
    wrong = found_in(tmp_path, NARROW, ("tl.exp(", "tl.exp2("))["wrong_output"]
    assert wrong.case.first_block == 0
    assert wrong.diagnosis == "exp2_for_exp"


def test_it_takes_little_memory(source: Source) -> None:
    """All four ops run in less than 1 GiB, imports included, with caches of 4 GiB each."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(source.path), *OPS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) < 2**30


def test_a_plugin_gets_no_large_caches_by_default() -> None:
    """A plugin without large_caches gets no large cache, and the report states it."""
    backend = find_backend(f"{EXAMPLE}:my_attention")
    large = {
        which: sum(c.first_block > 0 for c in hostile_cases(one, OPS[2], "sm_90", 20, 0))
        for which, one in (("plugin", backend), ("models", ModelBackend(rules="0.33.0")))
    }
    assert large["plugin"] == 0
    assert large["models"] > 0
    assert any("large_caches = True" in text for text in backend.blind_spots)


def test_without_address_space_the_case_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory is missing, the report has a line, without a finding or a traceback."""

    def refuse(*args, **kwargs):
        raise MemoryError

    backend = ModelBackend(rules="0.33.0")
    monkeypatch.setattr(plan, "hostile_cases", lambda *args: iter([far_case(backend, OPS[0])]))
    monkeypatch.setattr(np, "zeros", refuse)
    with pytest.raises(Unavailable, match=r"cannot provide 4\.0 GiB of address space"):
        untouched((2**31,), torch.float16)
    report = library.check_library(plan.Plan(backend=backend, ops=(OPS[0],), cases=1))
    assert report.cases_run == 0
    assert report.findings == []
    assert "GiB of address space" in report.not_run[0].reason


def test_far_caches_hold_what_near_ones_do() -> None:
    """Blocks from first_block on are equal, earlier ones are zero, in both layouts."""
    near = Case(
        query_lens=(3, 1), ctx_lens=(20, 40), num_heads=2, head_size=16, empty_slots="nan", seed=3
    )
    far = near.replace(first_block=7)
    one, other = Lab().cache(near), Lab().cache(far)
    assert torch.equal(other.provenance.block_table, one.provenance.block_table + 7)
    for a, b in ((one.key, other.key), (one.value, other.value)):
        assert torch.equal(a.view(torch.int16), b[7:].view(torch.int16))
        assert not b[:7].any()
    for a, b in zip(to_flash(one.key, one.value), to_flash(other.key, other.value, 7), strict=True):
        assert torch.equal(a.view(torch.int16), b[7:].view(torch.int16))
        assert not b[:7].any()


def test_on_a_gpu_key_and_value_share_the_blocks_before() -> None:
    """Both have all blocks, contiguous and aligned; the memory is that of one, and the used blocks differ."""
    key, value = torch.rand(3, 4, 2, 16, 8).half(), torch.rand(3, 4, 16, 16).half()
    far_key, far_value = in_one_buffer(key, value, 1000)
    for far, used in ((far_key, key), (far_value, value)):
        assert far.shape == (1003, *used.shape[1:])
        assert far.is_contiguous()
        assert far.data_ptr() % 16 == 0
        assert torch.equal(far[1000:], used)
    storage = far_key.untyped_storage()
    assert storage.data_ptr() == far_value.untyped_storage().data_ptr()
    assert storage.nbytes() == (1000 + 2 * 3) * key[0].nbytes


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "merge_attn_states"},
        {"op": "reshape_and_cache_flash"},
        {"backend": "rocm"},
        {"query_lens": (1,), "ctx_lens": (1,), "block_table": ((9,),)},
        {"num_blocks": 10},
    ],
)
def test_where_it_makes_no_sense(changes) -> None:
    """first_block is rejected if the op copies the cache or too few blocks remain."""
    with pytest.raises(InvalidCase, match="first_block"):
        Case(**{"first_block": 9, **changes})


@pytest.mark.releases
def test_its_script_needs_a_gpu_or_int64_strides(tmp_path: Path) -> None:
    """Without a GPU the script cannot decide and says why; with a GPU's strides it distinguishes the
    releases."""
    case = far_case(find_backend("vllm", of_release("0.11.2").path, "cpu"), "decode_attention_fwd")
    script = written(tmp_path, case.replace(first_block=case.first_block), "wrong_output")

    def run(version: str) -> tuple[int, str]:
        return script_outcome(
            script,
            of_release(version),
            lambda source: vllm_ops.load(source, PLATFORMS["sm_90"], "cpu"),
        )

    code, text = run("0.33.0")
    assert (code, "cannot tell here" in text) == (2, True), text
    script.write_text(
        script.read_text().replace(
            'if device == "cpu":\n    print("cannot', 'if 0:\n    print("cannot'
        )
    )
    code, text = run("0.11.2")
    assert (code, "2 of 2 rows are wrong" in text) == (1, True), text
    code, text = run("0.33.0")
    assert (code, "every row is right" in text) == (0, True), text
