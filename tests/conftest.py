"""What the tests share: one small case that is as hostile as a real batch, and helpers to look at it."""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from attnlab.batch import make_batch
from attnlab.cache import PagedCache, make_cache
from attnlab.call import KernelCall, make_call, make_output
from attnlab.case import Case
from attnlab.errors import Unavailable
from attnlab.hip.build import find_compiler
from attnlab.kernels.sdist import fetch_sdist
from attnlab.kernels.source import Source, find_source

# Block size 16, partitions of 256: (query_len, ctx_len) around the edges of both, without a context,
# with a query longer than the context, and decode rows before, between and behind the prefills.
HOSTILE_LENS = (
    (1, 1),
    (15, 0),
    (15, 1),
    (1, 15),
    (17, 16),
    (1, 16),
    (40, 3),
    (1, 255),
    (1, 256),
    (3, 254),
    (1, 300),
    (2, 15),
)


def hostile(**changes: Any) -> Case:
    """Return a small Case that leaves nothing to luck, with ``changes``.

    Shuffled blocks, of which some are spare; ragged lengths; two query heads a KV head, which is not
    the number of KV heads; NaN in every slot and output row that nobody writes; data of N(0, 1), so
    that a wrong scale or mask shows.
    """
    fields: dict[str, Any] = {
        "num_heads": 6,
        "num_queries_per_kv": 2,
        "head_size": 64,
        "block_size": 16,
        "query_lens": tuple(query_len for query_len, _ in HOSTILE_LENS),
        "ctx_lens": tuple(ctx_len for _, ctx_len in HOSTILE_LENS),
        "data": "normal",
        "empty": "nan",
        "output": "nan",
        "oracle": "float64",
        "seed": 7,
    }
    fields |= changes
    if "num_blocks" not in changes and "block_table" not in changes:
        fields["num_blocks"] = Case(**fields).total_blocks + 5
    return Case(**fields)


def call_of(case: Case) -> tuple[KernelCall, PagedCache]:
    """Return the Case's call and the cache it reads, made for it alone."""
    batch = make_batch(case)
    cache = make_cache(case, batch)
    return make_call(case, batch, cache, make_output(case)), cache


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Answer whether two tensors hold the same bytes, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def decode_rows(case: Case) -> torch.Tensor:
    """Return which output rows are those of decode sequences, [num_tokens] bool."""
    query_lens = torch.tensor(case.lengths.query_lens)
    return torch.repeat_interleave(query_lens == 1, query_lens)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Keep torch to one thread: for tensors this small more of them cost time."""
    torch.set_num_threads(1)


@functools.cache
def sdist_or_reason(version: str) -> Source | str:
    """Return a release's sdist, downloaded once, or why csrc/rocm's kernels cannot be had here."""
    try:
        find_compiler(os.environ.get("CXX"))
        return find_source(fetch_sdist(version))
    except Unavailable as error:
        return str(error)


def sdist(version: str) -> Source:
    """Return a release's sdist; skip the test where it, or a compiler, cannot be had."""
    found = sdist_or_reason(version)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(params=("0.11.2", "0.33.0"))
def rocm(request: pytest.FixtureRequest) -> Source:
    """Give the sdist of one release after the other."""
    return sdist(request.param)


NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SMALL = {"num_heads": 8, "draw_max_query_len": 96, "draw_max_ctx_len": 300}


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Run all notebooks as committed but for their size, once for all tests; give the reports' folder.

    Under pytest-xdist the first process that asks runs them, and the others wait.
    """
    from attnlab.investigate import find_notebooks, investigate

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    reports = shared / "small_run"
    with FileLock(shared / "small_run.lock"):
        if not (reports / "verdicts.json").exists():
            paths = find_notebooks([], NOTEBOOKS)
            investigate(paths, parameters=SMALL, reports=reports, timeout_s=600, jobs=2)
    return reports
