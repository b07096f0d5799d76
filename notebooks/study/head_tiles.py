"""Notebook 12: the tiles of query heads in vLLM's decode kernel, and three edits that repair them.

Nothing of vLLM is part of attnlab: the text is read from an installed vLLM, a wheel, an sdist or a checkout.
"""

from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.checker.finding import Finding
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result
from attnlab.reports.notebook_result import Event
from attnlab.reports.upstream import write_reports
from study.broken_kernel import PlantedFault, editable_source, plant_fault

TILE = 16  # query heads of a program, at most
_MODULE = "triton_decode_attention"
_OF_A_GROUP = "cur_head_id % tl.cdiv(kv_group_num, BLOCK_H) * BLOCK_H"
HEAD_TILE_EVENTS = (
    Event(name="vLLM 0.33.0", date="2026-11-22", text="wrong on an H200, too"),
    Event(name="SGLang 0.5.23", date="2026-11-23", text="the same heads on an H200"),
)
HEAD_TILE_IMPACT = (
    "wrong: callers with several KV heads and more than 16 query heads for each, in groups that are no "
    "multiple of 16; some heads attend to the keys of another KV head",
    "right: vLLM 0.33.0's own caller, MLA with one KV head",
)
HEAD_TILE_REPAIR = {
    "first head": PlantedFault(
        module=_MODULE,
        before="cur_head_id * VALID_BLOCK_H + tl.arange(0, BLOCK_H)",
        after=f"cur_kv_head * kv_group_num + {_OF_A_GROUP} + tl.arange(0, BLOCK_H)",
        text="a tile starts in the group of its KV head",
    ),
    "last head": PlantedFault(
        module=_MODULE,
        before="cur_head < (cur_head_id + 1) * VALID_BLOCK_H",
        after="cur_head < (cur_kv_head + 1) * kv_group_num",
        text="a tile ends with the group of its KV head",
    ),
    "tiles": PlantedFault(
        module=_MODULE,
        before="triton.cdiv(head_num, min(BLOCK_H, kv_group_num))",
        after="k_buffer.shape[-2] * triton.cdiv(kv_group_num, BLOCK_H)",
        text="each group has its own tiles",
    ),
}


def tile_source(path: str | None) -> Source:
    """Return the vLLM at ``path``, or the installed one; raise Unavailable without the text to edit."""
    return editable_source(path, HEAD_TILE_REPAIR)


def tile_lab(source: Source, folder: Path | None = None) -> Lab:
    """Return a Lab of a source under Triton's interpreter; with ``folder``, of a repaired copy there."""
    root = source.path
    if folder is not None:
        for name, edit in HEAD_TILE_REPAIR.items():
            root = plant_fault(source, edit, name, folder)
            source = find_source(root)
    return Lab(source=root, device="cpu")


def tile_case(source: Source, group: int, kv_heads: int = 2, **changes: Any) -> Case:
    """Return a decode of one token after 40, with ``group`` query heads for each KV head."""
    fields: dict[str, Any] = {
        "op": "decode_attention_fwd",
        "backend": "vllm",
        "release": source.rules,
        "platform": "sm_90",
        "num_heads": group * kv_heads,
        "num_queries_per_kv": group,
        "head_size": 32,
        "query_lens": (1,),
        "ctx_lens": (40,),
        "distribution": "normal",
        "stage": "sound",
        "fill": "all_rows",
    }
    return Case(**{**fields, **changes})


def predicted_heads(group: int, kv_heads: int = 2) -> list[int]:
    """Return the heads that read another KV head, if a tile of heads reads the KV head of its number."""
    size, tiles = min(TILE, group), -(-group // TILE)
    heads = range(group * kv_heads)
    return [head for head in heads if head // size // tiles != head // group]


def wrong_heads(result: Result) -> list[int]:
    """Return the heads with a number beyond its rounding bound."""
    assert result.errors is not None
    wrong: list[int] = (result.errors.mismatches > 0).any(0).nonzero().flatten().tolist()
    return wrong


def upstream_text(result: Result, found: Diagnosis, version: str, folder: Path) -> str:
    """Return the report for upstream, without its script, which is written to the folder next to it."""
    finding = Finding(
        op=result.case.op,
        kind="wrong_output",
        case=result.case,
        evidence=found.sentences()[0],
        diagnosis=found.status if found.cause is None else found.cause.name,
    )
    (text,) = (one for one in write_reports([finding], folder, version) if one.suffix == ".md")
    return text.read_text(encoding="utf-8").partition("```python")[0]


def heads_by_group(path: str | None = None) -> dict[int, list[int]]:
    """Return the wrong heads by group on the installed vLLM; raise Unavailable without one."""
    source = tile_source(path)
    lab = tile_lab(source)
    return {group: wrong_heads(lab.run(tile_case(source, group))) for group in (16, 20)}
