"""Chapters: the notebooks on one page, each with its question and, in a sentence, what comes of it.

Nothing here is remembered from a run of the notebooks: each sentence is made from the ledger of claims, or
from a small case in the form of the test's. The notebooks themselves do the same at the test's size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from attnlab.case.shown import Shown
from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.rows import as_read, served
from attnlab.contracts.target import ROCM_DECODE, Target
from attnlab.lab.lab import Lab
from attnlab.mutation.power import power
from attnlab.reports.investigate import find_notebooks
from attnlab.reports.pages import read_title
from attnlab.study.claims import Finding
from attnlab.study.claims.cases import decode_at_seed_size, like_the_test
from attnlab.study.claims.index_tensors import REFUSAL

Ledger: TypeAlias = Mapping[str, Finding]  # by the claim's number
Answer: TypeAlias = tuple[str, dict[str, Any]]  # a sentence, and the facts that it is made of


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One notebook: its file and question, the claims that it bears on, and what comes of it.

    ``verdict`` is empty and ``facts`` too where there is nothing to judge.
    """

    notebook: str
    question: str
    claims: tuple[str, ...] = ()
    verdict: str = ""
    facts: dict[str, Any]


class Chapters(Shown, list[Chapter]):
    """The notebooks in their order, which show themselves as a table with links."""

    __slots__ = ()


def read_chapters(folder: Path, ledger: list[Finding]) -> Chapters:
    """Return a Chapter for each notebook of a folder but the first page, number 00."""
    from nbformat import read

    by_number = {finding.claim.number: finding for finding in ledger}
    found = Chapters()
    for path in find_notebooks([], folder):
        number = path.stem[:2]
        if number == "00":
            continue
        claims, judge = _JUDGES.get(number, ((), _nothing))
        verdict, facts = judge(by_number)
        found.append(
            Chapter(
                notebook=path.name,
                question=read_title(read(path, as_version=4)),
                claims=claims,
                verdict=verdict,
                facts=facts,
            )
        )
    return found


def _nothing(ledger: Ledger) -> Answer:
    return "", {}


def _int64_tables(ledger: Ledger) -> Answer:
    """Say which index tensors are checked, and what int64 does in the others."""
    seen = ledger["C2"].evidence
    checked = [name for name, text in seen.items() if text == REFUSAL]
    rest = {name: text for name, text in seen.items() if name not in checked}
    others = "; ".join(f"int64 {name} is taken: {text}" for name, text in rest.items())
    return f"{' and '.join(checked)} are checked; {others}", {
        "checked": checked,
        "taken": [*rest],
    }


def _fp8_e5m2(ledger: Ledger) -> Answer:
    """Say where fp8_e5m2 is rejected, and what the test's FP8 cache holds."""
    rejected: Any = ledger["C6"].evidence["rejected"]
    cache = Lab().cache(like_the_test(kv_cache_dtype="fp8", cache_write="numeric"))
    nonzero = int(cache.key.count_nonzero() + cache.value.count_nonzero())
    told = (
        "ROCm's kernel, where it is dispatched: of eight settings of head_size, GQA ratio and window only "
        f"at {'; '.join(rejected)}. The test's FP8 cache has {nonzero} bytes that are not 0"
    )
    return told, {"rejected": rejected, "nonzero bytes": nonzero}


def _missing_token(ledger: Ledger) -> Answer:
    """Say how far the missing token moves the decode row, and whether the test sees it."""
    case = decode_at_seed_size()
    result = Lab().run(case)
    kinds = sorted({violation.kind for violation in result.violations})
    sizes = {name: ledger["C13"].evidence[name] for name in ("gfx942", "sm_90")}
    moved = ", ".join(f"{size:.2g} on {name}" for name, size in sizes.items())
    told = (
        f"it breaks the decode kernel's contract ({', '.join(kinds)}) and moves the row by {moved}; "
        f"the tolerance is {case.tolerance:g}: {result.status}"
    )
    return told, {"violations": kinds, "the test says": result.status}


def _which_bug(ledger: Ledger) -> Answer:
    """Say what the diagnosis finds in the failing stage."""
    evidence = ledger["C11"].evidence
    told = (
        f"{evidence['cause']}: torch.cumsum gives {ledger['C3'].evidence['query_start_loc']}, and a row "
        f"stays unwritten; the missing token predicts {evidence['predicted']:.2g} where "
        f"{evidence['observed']:.4g} was seen"
    )
    return told, {"cause": evidence["cause"]}


def _explorer(ledger: Ledger) -> Answer:
    """Say which single toggle mends the failing stage, and which does not."""
    failing, lab = like_the_test(stage="int32_before_cumsum"), Lab()
    toggles: dict[str, dict[str, Any]] = {
        "query_start_loc_dtype=int32": {"query_start_loc_dtype": "int32"},
        "platform=sm_90": {"platform": "sm_90"},
        "fill=all_rows": {"fill": "all_rows"},
        "fill=decode_rows": {"fill": "decode_rows"},
        "empty=garbage": {"empty_slots": "garbage"},
    }
    ran = {name: lab.run(failing.replace(**change)).status for name, change in toggles.items()}
    mends = [name for name, status in ran.items() if status == "match"]
    rest = [name for name in ran if name not in mends]
    told = f"of the failing state, {' or '.join(mends) or 'nothing'} alone mends it; {', '.join(rest)} do not"
    return told, {"mends": mends, "does not": rest}


def _production(ledger: Ledger) -> Answer:
    """Say what vLLM's engine was seen to do, or why it was not."""
    found = [ledger["C17"], ledger["C18"]]
    return "; ".join(dict.fromkeys(one.reading for one in found)), {
        one.claim.number: one.verdict for one in found
    }


def _power(ledger: Ledger) -> Answer:
    """Say which wrong kernels pass the test's data and tolerance, and its FP8 cases."""
    names = ("scale_doubled", "causal_plus_one", "keys_of_next_sequence")
    plain = power(like_the_test(), remedies=False)
    fp8 = power(like_the_test(kv_cache_dtype="fp8", cache_write="numeric"), remedies=False)
    passing = [mutant.name for mutant in plain.named(names) if mutant.outcome == "survived"]
    zeros = fp8.named(["rows_zero"])[0].outcome
    passes = "passes" if zeros == "survived" else "does not pass"
    told = (
        f"{len(plain.survivors)} of {len(plain.mutants)} wrong kernels pass a small batch of its data, "
        f"{', '.join(passing)} among them; with FP8 {len(fp8.survivors)} of {len(fp8.mutants)}, and an "
        f"output of zeros {passes}"
    )
    return told, {"pass": passing, "zeros in FP8": zeros}


def _rocm_kernel(ledger: Ledger) -> Answer:
    """Say which rows ROCm's kernel writes in eight decodes with an int64 query_start_loc."""
    case = like_the_test(query_lens=(1,) * 8, ctx_lens=(40,) * 8, query_start_loc_dtype="int64")
    terms, call = contract(ROCM_DECODE, Target.of(case), case.op), Lab().call(case)
    seqs = torch.nonzero(served(terms, call)).flatten().tolist()
    rows = as_read(terms, call, "query_start_loc")[seqs].tolist()
    written = " and ".join(
        f"row {row}, from the cache of sequence {seq}" for row, seq in zip(rows, seqs, strict=True)
    )
    told = (
        "by its contract, of eight decodes with int64 query_start_loc it writes "
        f"{written or 'no row'}; the notebook runs its own source"
    )
    return told, {"rows": rows, "from sequences": seqs}


_JUDGES: dict[str, tuple[tuple[str, ...], Callable[[Ledger], Answer]]] = {
    "01": (("C1", "C2", "C4"), _int64_tables),
    "02": (("C5", "C6", "C22"), _fp8_e5m2),
    "03": (("C12", "C13", "C14", "C15", "C16"), _missing_token),
    "04": (("C3", "C8", "C9", "C10", "C11", "C19", "C21"), _which_bug),
    "05": ((), _explorer),
    "06": (("C17", "C18"), _production),
    "07": ((), _power),
    "08": (("C1", "C2", "C5"), _rocm_kernel),
}
