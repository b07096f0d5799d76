"""The ledger: the claims of the investigation's notes, each judged by an experiment."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from study.claims import cache, index_tensors, kernels, production
from study.claims.ledger import FAILS, HOLDS, UNDECIDED, Claim, Entry, Finding, Findings

LEDGER: tuple[Entry, ...] = tuple(
    sorted(
        (*index_tensors.ENTRIES, *kernels.ENTRIES, *cache.ENTRIES, *production.ENTRIES),
        key=lambda entry: int(entry.claim.number.removeprefix("C")),
    )
)


def judge_claims(on_step: Callable[[str, int, int], None] | None = None) -> Findings:
    """Return the finding about every claim, in the order of the ledger.

    vLLM's engine takes half of the time; it runs in a child process while the other claims are judged.
    ``on_step`` is called with a claim's number, the claims done and their total.
    """
    findings = Findings()
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(production.ask) if {*production.ENTRIES} & {*LEDGER} else None
        for done, entry in enumerate(LEDGER):
            if on_step is not None:
                on_step(entry.claim.number, done, len(LEDGER))
            if engine is not None and entry in production.ENTRIES:
                engine.result()
            findings.append(entry.judge(entry.claim))
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
