"""The overview of the notebooks: the question of each, and its answer in one sentence.

Each answer is computed from the ledger of claims, or from a small Case like the test's. The notebooks
themselves compute it at the size of the test.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.shown import Shown
from attnlab.contracts.contract import ROCM_DECODE, Target, contract
from attnlab.contracts.slot_states import as_read, served
from attnlab.diagnosis.diagnose import diagnose
from attnlab.lab.lab import Lab
from attnlab.mutation.power import measure_power as power
from attnlab.reports.investigate import find_notebooks
from attnlab.reports.pages import read_title
from attnlab.show.sheets.sheet import Grid, Link, Row, Sheet, Words
from study.broken_kernel import rule_of
from study.claims import Finding
from study.claims.cases import decode_at_seed_size, like_the_test
from study.claims.index_tensors import REFUSAL
from study.failing_test import example_kernel
from study.head_tiles import heads_by_group
from study.mla_chain import cause_of_edit

Ledger: TypeAlias = Mapping[str, Finding]  # by the claim's number
Answer: TypeAlias = tuple[str, dict[str, Any]]  # a sentence, and the facts in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One notebook: its file, its question, the claims that it examines and its answer.

    ``verdict`` and ``facts`` are empty if the overview has no answer for the notebook.
    """

    notebook: str
    question: str
    claims: tuple[str, ...] = ()
    verdict: str = ""
    facts: dict[str, Any]


class Chapters(Shown, list[Chapter]):
    """The notebooks in their order, shown as a table with links."""

    __slots__ = ()

    def sheet(self) -> Sheet:
        """Return a row for each notebook: its question, the answer, and the claims that it concerns."""
        judged = sum(bool(one.verdict) for one in self)
        summary = f"{len(self)} notebooks, {judged} of them answered here"
        rows: list[Row] = [
            [
                Link(one.notebook[:2], one.notebook),
                Link(one.question, one.notebook),
                one.verdict or Words("no verdict: explore it by hand", "quiet"),
                ", ".join(one.claims),
            ]
            for one in self
        ]
        columns = ["number", "question", "answer, computed here", "claims"]
        return Sheet.of("Notebooks", summary, Grid(columns, rows, most=len(rows)), name="Chapters")


def read_chapters(ledger: list[Finding], folder: Path | None = None) -> Chapters:
    """Return a Chapter for each notebook of a folder except number 00; default: the current folder."""
    from nbformat import read

    by_number = {finding.claim.number: finding for finding in ledger}
    found = Chapters()
    for path in find_notebooks([], folder or Path.cwd()):
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
    """State which index tensors are checked, and what int64 does in the others."""
    seen = ledger["C2"].evidence
    checked = [name for name, text in seen.items() if text == REFUSAL]
    rest = {name: text for name, text in seen.items() if name not in checked}
    others = "; ".join(f"int64 {name} is accepted: {text}" for name, text in rest.items())
    return f"{' and '.join(checked)} are checked; {others}", {
        "checked": checked,
        "taken": [*rest],
    }


def _fp8_e5m2(ledger: Ledger) -> Answer:
    """State where fp8_e5m2 is rejected, and what the FP8 cache of the test holds."""
    rejected: Any = ledger["C6"].evidence["rejected"]
    cache = Lab().cache(like_the_test(kv_cache_dtype="fp8", cache_write="numeric"))
    nonzero = int(cache.key.count_nonzero() + cache.value.count_nonzero())
    sentence = (
        "the ROCm kernel rejects it: of eight settings of head_size, GQA ratio and window, at "
        f"{'; '.join(rejected)}. The FP8 cache of the test has {nonzero} nonzero bytes"
    )
    return sentence, {"rejected": rejected, "nonzero bytes": nonzero}


def _missing_token(ledger: Ledger) -> Answer:
    """State how far the missing token moves the decode row, and whether the test detects it."""
    case = decode_at_seed_size()
    result = Lab().run(case)
    kinds = sorted({violation.kind for violation in result.violations})
    sizes = {name: ledger["C13"].evidence[name] for name in ("gfx942", "sm_90")}
    moved = ", ".join(f"{size:.2g} on {name}" for name, size in sizes.items())
    sentence = (
        f"it violates the contract of the decode kernel ({', '.join(kinds)}) and moves the row by {moved}; "
        f"the tolerance is {case.tolerance:g}: {result.status}"
    )
    return sentence, {"violations": kinds, "the test says": result.status}


def _which_bug(ledger: Ledger) -> Answer:
    """State what the diagnosis finds in the failing stage."""
    evidence = ledger["C11"].evidence
    sentence = (
        f"{evidence['cause']}: torch.cumsum returns {ledger['C3'].evidence['query_start_loc']}, and a row "
        f"stays unwritten; the missing token predicts an error of {evidence['predicted']:.2g}, and "
        f"{evidence['observed']:.4g} was observed"
    )
    return sentence, {"cause": evidence["cause"]}


CHANGES: dict[str, dict[str, Any]] = {  # one change each of the failing stage
    "query_start_loc_dtype=int32": {"query_start_loc_dtype": "int32"},
    "platform=sm_90": {"platform": "sm_90"},
    "fill=all_rows": {"fill": "all_rows"},
    "fill=decode_rows": {"fill": "decode_rows"},
    "empty_slots=garbage": {"empty_slots": "garbage"},
}


def _explorer(ledger: Ledger) -> Answer:
    """State which single change fixes the failing stage, and which does not."""
    failing, lab = like_the_test(stage="int32_before_cumsum"), Lab()
    status = {name: lab.run(failing.replace(**change)).status for name, change in CHANGES.items()}
    fixing = [name for name, text in status.items() if text == "match"]
    rest = [name for name in status if name not in fixing]
    sentence = (
        f"{' or '.join(fixing) or 'no single change'} fixes the failing stage; "
        f"{', '.join(rest)} do not"
    )
    return sentence, {"fixes": fixing, "does not": rest}


def _production(ledger: Ledger) -> Answer:
    """State what vLLM's engine did, or why it could not be observed."""
    found = [ledger["C17"], ledger["C18"]]
    return "; ".join(dict.fromkeys(one.reading for one in found)), {
        one.claim.number: one.verdict for one in found
    }


def _power(ledger: Ledger) -> Answer:
    """State which wrong kernels pass the data and tolerance of the test, and its FP8 cases."""
    names = ("scale_doubled", "causal_plus_one", "keys_of_next_sequence")
    plain = power(like_the_test(), remedies=False)
    fp8 = power(like_the_test(kv_cache_dtype="fp8", cache_write="numeric"), remedies=False)
    passing = [mutant.name for mutant in plain.named(names) if mutant.outcome == "survived"]
    zeros = fp8.named(["rows_zero"])[0].outcome
    passes = "passes" if zeros == "survived" else "does not pass"
    sentence = (
        f"{len(plain.survivors)} of {len(plain.mutants)} wrong kernels pass on a small batch of its data, "
        f"including {', '.join(passing)}; with FP8 {len(fp8.survivors)} of {len(fp8.mutants)} pass, and "
        f"an output of zeros {passes}"
    )
    return sentence, {"pass": passing, "zeros in FP8": zeros}


def _rocm_kernel(ledger: Ledger) -> Answer:
    """State which rows the ROCm kernel writes in eight decodes with an int64 query_start_loc."""
    case = like_the_test(query_lens=(1,) * 8, ctx_lens=(40,) * 8, query_start_loc_dtype="int64")
    terms, call = contract(ROCM_DECODE, Target.of(case), case.op), Lab().call(case)
    seqs = torch.nonzero(served(terms, call)).flatten().tolist()
    rows = as_read(terms, call, "query_start_loc")[seqs].tolist()
    written = " and ".join(
        f"row {row}, from the cache of sequence {seq}" for row, seq in zip(rows, seqs, strict=True)
    )
    sentence = (
        "by its contract, for eight decodes with int64 query_start_loc it writes "
        f"{written or 'no row'}; the notebook runs the source itself"
    )
    return sentence, {"rows": rows, "from sequences": seqs}


def _failing_test(ledger: Ledger) -> Answer:
    """State the defect that explains the kernel of the example, run on two sequences."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(
                op="unified_attention",
                num_heads=1,
                head_size=32,
                block_size=16,
                sliding_window=8,
                query_lens=(1, 3),
                ctx_lens=(39, 15),
                distribution="normal",
                stage="sound",
                platform="sm_90",
                backend=example_kernel(Path(folder)),
            )
            found = diagnose(case, Lab().output(case), propose=False)
    except (Unavailable, InvalidCase) as error:
        return f"not observed here: {error}", {"cause": None}
    cause = "no known defect" if found.cause is None else found.cause.name
    return f"the kernel of the example is wrong: {cause}", {"cause": cause}


def _broken_kernel(ledger: Ledger) -> Answer:
    """State what the X-ray finds in vLLM's prefill kernel with one of the planted faults."""
    try:
        rule = rule_of("late start")
    except (Unavailable, InvalidCase) as error:
        return f"not observed here: {error}", {"rule": None}
    sentence = "its weights show a rule that no catalogue has"
    return f"{sentence}: {rule or 'none was found'}", {"rule": rule}


def _mla_chain(ledger: Ledger) -> Answer:
    """State what names a merge that exchanges the weights of its parts, planted in vLLM's Triton source."""
    try:
        step, cause = cause_of_edit("weights_exchanged")
    except (Unavailable, InvalidCase) as error:
        return f"not observed here: {error}", {"step": None, "cause": None}
    sentence = f"a merge that exchanges two weights is first wrong at {step}, and is named {cause}"
    return sentence, {"step": step, "cause": cause}


def _head_tiles(ledger: Ledger) -> Answer:
    """State which heads of two groups are wrong in the installed vLLM."""
    try:
        wrong = heads_by_group()
    except (Unavailable, InvalidCase) as error:
        return f"not observed here: {error}", {"wrong": None}
    first, last = wrong[20][0], wrong[20][-1]
    sentence = (
        f"heads {first} to {last} of two groups of 20: a tile of 16 heads has one KV head; with groups of "
        f"16, {len(wrong[16])} heads are wrong"
    )
    return sentence, {"wrong": [first, last]}


_JUDGES: dict[str, tuple[tuple[str, ...], Callable[[Ledger], Answer]]] = {
    "01": (("C1", "C2", "C4"), _int64_tables),
    "02": (("C5", "C6", "C22"), _fp8_e5m2),
    "03": (("C12", "C13", "C14", "C15", "C16"), _missing_token),
    "04": (("C3", "C8", "C9", "C10", "C11", "C19", "C21"), _which_bug),
    "05": ((), _explorer),
    "06": (("C17", "C18"), _production),
    "07": ((), _power),
    "08": (("C1", "C2", "C5"), _rocm_kernel),
    "09": ((), _failing_test),
    "10": ((), _broken_kernel),
    "11": ((), _mla_chain),
    "12": ((), _head_tiles),
}
