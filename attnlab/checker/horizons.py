"""The int32 horizons of a vLLM's attention ops, as findings and observations of a check.

A finding is a size that one GPU of 288 GB holds with the weights of a model, an observation a larger one.
Only kernels whose launch is described count; each statement was run at its size, and at the size before it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.ops import DECODE_FWD, OPS, PREFILL, WRAPPER
from attnlab.checker.finding import BEYOND, HORIZON, Finding
from attnlab.horizon.launch import PRESETS, Deployment
from attnlab.horizon.survey import Row, Survey, survey
from attnlab.kernels.backend import Backend

GPU_MEMORY = 288  # GB, as in _WORDS of a finding
COST_S = 1.5  # of an op, in the units of costs.json
# The model whose sizes the other arguments have. vLLM runs its Triton decode for latent caches only.
_MODELS = {DECODE_FWD: "DeepSeek-V2-Lite"}
_MODEL = "Llama-3.1-8B"
# Sizes that grow with the load of a server; the others are decided by the model.
_SIZES = ("tokens", "seqs", "blocks", "ctx_len")
_WORDS = {
    "tokens": "tokens of a step",
    "seqs": "sequences of a step",
    "blocks": "blocks",
    "ctx_len": "tokens of a sequence",
}


def has_horizons(backend: Backend) -> bool:
    """Answer whether the launches of a backend's kernels are described: those of vLLM, on the interpreter."""
    return backend.name == "vllm" and backend.is_interpreted


@functools.cache
def deployment_of(op: str) -> Deployment:
    """Return the largest load of an op's model: all free memory is cache.

    A sequence has a block of its own. A step has at most half as many new tokens as the cache has slots,
    which leaves half of the free memory to the activations.
    """
    model = PRESETS[_MODELS.get(op, _MODEL)]
    slots = model.cache_tokens(GPU_MEMORY)
    return dataclasses.replace(
        model,
        gpu_memory=GPU_MEMORY,
        batched_tokens=slots // 2,
        seqs=slots // model.block_size,
    )


def ops_with_files(op: str, ops: Sequence[str]) -> list[str]:
    """Return the ops whose files hold the kernels of an op, if ``ops`` are checked."""
    return [op, PREFILL] if op == WRAPPER and PREFILL not in ops else [op]


def horizon_verdict(backend: Backend, case: Case, ops: Sequence[str]) -> dict[str, Any]:
    """Return the verdict of the horizons of a Case's op, with the keys of ``case_verdict``.

    ``ops``: those of :func:`ops_with_files`.
    """
    source = backend.op_source
    assert source is not None
    verdict: dict[str, Any] = {"ran": True, "findings": [], "unsupported": "", "not_run": ""}
    verdict |= {"reads": None, "allowed": None, "kernels": [], "points": {}, "arguments": {}}
    try:
        found = survey(
            source.root,
            files=[source.op_file(OPS[op].module) for op in ops],
            deployment=deployment_of(case.op),
            is_assuming=False,
            sizes=_SIZES,
        )
    except AttnLabError as error:
        return {**verdict, "ran": False, "unsupported": f"int32 horizons: {error}"}
    verdict["findings"] = [one.to_verdict() for one in _findings(found, case)]
    reasons = [f"int32 horizon of {one.kernel}: {one.why}" for one in found.not_run]
    return {**verdict, "unsupported": "; ".join(reasons)}


def _findings(found: Survey, case: Case) -> Iterator[Finding]:
    """Yield a finding or an observation for each kernel and size, at its smallest value."""
    nearest: dict[tuple[str, str], list[Row]] = {}
    for row in found.rows:
        nearest.setdefault((row.kernel.kernel, row.statement.size), []).append(row)
    for rows in nearest.values():
        first = min(rows, key=lambda row: row.statement.wrong_at or 0)
        yield _finding(first, sum(1 + row.also for row in rows) - 1, case, found.deployment)


def _finding(row: Row, more: int, case: Case, deployment: Deployment | None) -> Finding:
    assert deployment is not None
    one, words = row.statement, _WORDS[row.statement.size]
    assert one.access is not None
    fits = f"{row.limits[one.size]:,} fit with {deployment.name} on one GPU of {GPU_MEMORY} GB"
    place = f"{one.access.site.place} {one.effect}"
    others = f"; further expressions: {more}" if more else ""
    return Finding(
        op=case.op,
        kind=HORIZON if row.is_reached else BEYOND,
        case=case,
        evidence=f"with {one.wrong_at:,} {words} ({fits}), {place}: {one.site.text} of line "
        f"{one.site.line} overflows int32{others}",
        diagnosis=f"{row.kernel.kernel}: {one.wrong_at:,} {words}",
        horizon=(
            *("--kernel", row.kernel.kernel, "--described", "--deployment", deployment.name),
            *("--gpu-memory", str(GPU_MEMORY)),
            *("--batched-tokens", str(deployment.batched_tokens), "--seqs", str(deployment.seqs)),
        ),
    )
