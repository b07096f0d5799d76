"""Compare two backends on random cases: which of them is wrong, by the float64 reference and its bounds."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.shown import Shown, json_fields
from attnlab.checker.hostile import random_case
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab
from attnlab.replay.replay_call import CANNOT_RUN, MATCH, Difference, compare_outputs, run_on
from attnlab.show.sheets.sheet import Facts, Grid, Lines, Row, Sheet, Tone, Words
from attnlab.tensors.call import KernelCall

_SHOWN = ("kv_cache_dtype", "sliding_window", "mask", "softcap", "sinks", "alibi", "kv_layout", "freed",
          "sm_scale", "num_splits", "pad_batch", "interleave_v")  # fmt: skip
_DRAWS = 20  # for each case, until one fits both backends


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a backend made of a case: a status as of a replay, the reason, and the error."""

    status: str
    reason: str = ""
    error: Difference | None = None

    @property
    def is_wrong(self) -> bool:
        """Answer whether the backend ran the case and is wrong."""
        return self.status not in (MATCH, CANNOT_RUN)

    def text(self) -> str:
        """Return the status with the size of the error, or the reason."""
        if self.error is None or not self.error.elements:
            return f"{self.status}: {self.reason}" if self.reason else self.status
        one = self.error
        size = (
            f"off by up to {one.in_bounds:.3g} bounds"
            if math.isfinite(one.in_bounds)
            else "not finite"
        )
        return f"wrong: {one.rows} of {one.num_rows} rows, {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A random case and both outcomes; ``case`` has the first backend."""

    case: Case
    outcomes: tuple[Outcome, Outcome]

    @property
    def is_different(self) -> bool:
        """Answer whether one of the backends is wrong."""
        return any(one.is_wrong for one in self.outcomes)

    @property
    def text(self) -> str:
        """Return the sizes of the case, its lengths (new and context tokens), and what is unusual."""
        case = self.case
        lengths = zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True)
        words = [
            f"{case.num_heads} heads of {case.head_size}, {case.num_queries_per_kv} per KV head, "
            f"blocks of {case.block_size}, {case.dtype}; {', '.join(f'{q}+{c}' for q, c in lengths)} tokens"
        ]
        words += [f"{name} {value}" for name, value in case.changes().items() if name in _SHOWN]
        return "; ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Random cases on two backends, ``names``; ``left_out``: how often a draw did not fit one, by reason."""

    names: tuple[str, str]
    cases: tuple[Compared, ...]
    left_out: dict[str, int]

    @property
    def exit_code(self) -> int:
        """Return 1 if a backend is wrong in a case, 3 if none is but none of the cases ran, otherwise 0."""
        if any(one.is_different for one in self.cases):
            return 1
        return 0 if self.cases else 3

    @property
    def ordered(self) -> list[Compared]:
        """Return the cases, those with a difference first."""
        return sorted(self.cases, key=lambda one: not one.is_different)

    def marks(self) -> list[list[tuple[bool, str]]]:
        """Return whether each backend is wrong, and the text of a picture, of each case in that order."""
        return [
            [(each.is_wrong, f"{one.text}: {each.text()}") for each in one.outcomes]
            for one in self.ordered
        ]

    def sentences(self) -> list[str]:
        """Return which side is wrong, how often, and how to go on."""
        if not self.cases:
            return ["no case ran on both"]
        wrong = [sum(one.outcomes[i].is_wrong for one in self.cases) for i in (0, 1)]
        found = [
            f"{name} is wrong in {count} of {len(self.cases)} cases"
            for name, count in zip(self.names, wrong, strict=True)
            if count
        ]
        if not found:
            return [f"both are right up to rounding in {len(self.cases)} cases"]
        return ["; ".join(found)]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as values of strict JSON; each case with its command."""
        fields = json_fields(self)
        for entry, one in zip(fields["cases"], self.cases, strict=True):
            entry["run"] = one.case.to_cli()
        return {**fields, "sentences": self.sentences(), "exit_code": self.exit_code}

    def sheet(self) -> Sheet:
        """Return a row for each case, those with a difference first."""
        tone: Tone = "bad" if self.exit_code == 1 else "good" if self.cases else "warn"
        rows = [_row(number, one) for number, one in enumerate(self.ordered, 1)]
        return Sheet.of(
            "Comparison",
            "different" if tone == "bad" else "the same",
            Lines([*self.sentences(), *self._next()]),
            Grid(("", "case", *self.names), rows, most=len(rows)),
            Facts([("left out", f"{n} draws: {text}") for text, n in self.left_out.items()]),
            tone=tone,
        )

    def _next(self) -> list[Words]:
        """Return the command that diagnoses the first wrong case."""
        for one in self.cases:
            if one.outcomes[0].is_wrong:
                command = one.case.to_cli().replace("attnlab run", "attnlab diagnose", 1)
                return [Words(f"why: {command} --html page.html", "quiet")]
        return []


def _row(number: int, one: Compared) -> Row:
    tones: list[Tone] = ["bad" if each.is_wrong else "good" for each in one.outcomes]
    texts = [Words(each.text(), tone) for each, tone in zip(one.outcomes, tones, strict=True)]
    return [number, one.text, *texts]


def compare_backends(
    backends: tuple[Backend, Backend],
    names: tuple[str, str],
    *,
    op: str,
    platform: str,
    count: int,
    seed: int,
    on_case: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Run ``count`` random cases of an op on two backends, and hold each output to the float64 reference.

    A draw that one of them does not support is left out, and another one is drawn. Raises InvalidCase if a
    backend has no such op.
    """
    for one in backends:
        if not one.has_op(op):
            raise InvalidCase(f"op must be one that {one.version} has, got {op}")
    left_out: Counter[str] = Counter()
    found: list[Compared] = []
    for case in _cases(backends, op, platform, count * _DRAWS, seed):
        on_case(len(found))
        call = Lab().call(case.replace(backend="model", trace_reads=False))
        outcomes = tuple(_outcome(call, one, platform) for one in backends)
        compared = Compared(case=case, outcomes=(outcomes[0], outcomes[1]))
        reasons = [each.reason for each in compared.outcomes if each.status == CANNOT_RUN]
        if reasons:
            left_out[reasons[0]] += 1
            continue
        found.append(compared)
        if len(found) == count:
            break
    return Comparison(names=names, cases=tuple(found), left_out=dict(left_out))


def _cases(
    backends: tuple[Backend, Backend], op: str, platform: str, count: int, seed: int
) -> Iterator[Case]:
    """Yield random cases that fit both backends, at most ``count`` draws."""
    rng, other = random.Random(seed), backends[1]
    for _ in range(count):
        with suppress(InvalidCase):
            case = random_case(backends[0], op, platform, rng)
            other.check_features(case.replace(backend=other.name, release=other.release))
            yield case


def _outcome(call: KernelCall, backend: Backend, platform: str) -> Outcome:
    """Run a call on a backend and compare its output with the reference."""
    try:
        ran = run_on(call, backend, Case(platform=platform), ("platform",))
    except AttnLabError as error:
        return Outcome(status=CANNOT_RUN, reason=str(error))
    if ran.output is None:
        return Outcome(status=ran.status, reason=str(ran.failure))
    return Outcome(status=ran.status, error=compare_outputs(ran.output, None, ran.expected))
