"""The ledger of claims: what the investigation's notes say, each judged by an experiment."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from attnlab.study.claims import cache, index_tensors, kernels, production
from attnlab.study.claims.ledger import FAILS, HOLDS, UNDECIDED, Claim, Entry, Finding, Findings

LEDGER: tuple[Entry, ...] = tuple(
    sorted(
        (*index_tensors.ENTRIES, *kernels.ENTRIES, *cache.ENTRIES, *production.ENTRIES),
        key=lambda one: int(one.claim.number.removeprefix("C")),
    )
)


def judge_claims(on_step: Callable[[str, int, int], None] | None = None) -> Findings:
    """Return what came of every claim, in the ledger's order.

    vLLM's engine, which takes a process of its own and half of the time, runs while the others are judged.
    """
    findings = Findings()
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(production.ask) if {*production.ENTRIES} & {*LEDGER} else None
        for done, one in enumerate(LEDGER):
            if on_step is not None:
                on_step(one.claim.number, done, len(LEDGER))
            if engine is not None and one in production.ENTRIES:
                engine.result()
            findings.append(one.judge(one.claim))
    return findings


__all__ = [
    "FAILS",
    "HOLDS",
    "LEDGER",
    "UNDECIDED",
    "Claim",
    "Entry",
    "Finding",
    "Findings",
    "judge_claims",
]
