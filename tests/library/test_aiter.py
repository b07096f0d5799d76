"""AITER's decode with partitions of 1,024 keys: cases reach them, planted faults are named."""

from pathlib import Path

import pytest
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.checker.hostile import hostile_cases
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import find_backend
from attnlab.lab.lab import Lab

OP, BACKEND, PLATFORM = "aiter_pa_decode", "library:aiter", "gfx942"
# The text of the op is ours.
DECODE = """
import torch

PARTITION = 1024


def paged_attention_decode(output, query, key_cache, value_cache, seq_lens, block_tables, attn_scale,
                           max_seq_len, compute_type, k_scale, v_scale, num_seq_partitions=0,
                           alibi_slopes=None):
    group, size = query.shape[1] // key_cache.shape[1], key_cache.shape[2]
    for i, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        slots = torch.arange(length)
        pages = block_tables[i].long()[slots // size]
        key, value = (
            (one[pages, :, slots % size].float() * scale).repeat_interleave(group, 1)
            for one, scale in ((key_cache, k_scale), (value_cache, v_scale))
        )
        scores = torch.einsum("hd,khd->hk", query[i].float(), key) * attn_scale
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[:, None] * (slots - length + 1)
        step = PARTITION if max_seq_len > PARTITION else length
        parts = range(0, {end}, step)
        tops = torch.stack([scores[:, at : at + step].amax(1) for at in parts])
        weights = [(scores[:, at : at + step] - top[:, None]).exp() for at, top in zip(parts, tops)]
        sums = torch.stack([one.sum(1) for one in weights])
        outs = torch.stack(
            [torch.einsum("hk,khd->hd", one, value[at : at + step]) for at, one in zip(parts, weights)]
        )
        outs = outs / sums[..., None]
        sums = sums * ({times})
        output[i] = ((sums / sums.sum(0))[..., None] * outs).sum(0)
"""
RIGHT = {"end": "length", "times": "(tops - tops.amax(0)).exp()"}
FAULTS = {
    "partitions_not_rescaled": {"times": "1.0"},
    "last_partition_dropped": {"end": "max(step, length // step * step)"},
}


def aiter(folder: Path, **fault: str) -> Path:
    """Return a made-up AITER with one op; a fault is other text in the merge of its partitions."""
    file = folder / "aiter/ops/triton/attention/pa_decode.py"
    file.parent.mkdir(parents=True)
    text = DECODE
    for name, value in (RIGHT | fault).items():
        text = text.replace(f"{{{name}}}", value)
    file.write_text(text)
    return folder


def long_cases(source: Path) -> list[Case]:
    """Return the hostile cases whose longest sequence has more than one partition."""
    cases = hostile_cases(find_backend(BACKEND, source), OP, PLATFORM, None, 0)
    return [one for one in cases if max(one.lengths.seq_lens) > 1024]


@needs_triton
def test_cases_reach_the_partitions(tmp_path):
    """Sequences of one to three partitions, the last partly full, and those around a partition's end."""
    cases = long_cases(aiter(tmp_path))
    lens = {one.lengths.seq_lens for one in cases}
    assert lens == {(1364, 21), (2088, 1040, 21), (1023, 1024, 1025)}
    assert {one.num_queries_per_kv for one in cases} >= {1, 2, 3}
    assert {one.alibi for one in cases} == {True, False}
    assert max(one.num_heads for one in cases) <= 6
    lab = Lab(source=tmp_path)
    assert {lab.run(case).status for case in cases} == {"match"}


@needs_triton
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_merge_is_found_and_named(tmp_path, name):
    source = aiter(tmp_path, **FAULTS[name])
    lab = Lab(source=source)
    wrong = [case for case in long_cases(source) if lab.run(case).status == "mismatch"]
    assert len(wrong) >= 3
    lens = {"query_lens": (1, 1, 1), "ctx_lens": (2587, 1363, 20), "num_heads": 4, "sm_scale": 0.5}
    case = Case(op=OP, backend=BACKEND, platform=PLATFORM, distribution="normal", **lens)
    found = diagnose(case, lab=lab)
    assert found.cause.name == name
