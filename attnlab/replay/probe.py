"""Probe: is a difference corruption, or another order of sums? Runs the variations of a call."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidValue, KernelRejected, Unavailable
from attnlab.case.shown import Shown
from attnlab.diagnosis.captured import check_diagnosable
from attnlab.kernels.backend import Backend
from attnlab.kernels.control import Instability, controlled, uncontrolled
from attnlab.replay.expected import Expected
from attnlab.replay.replay_call import Ran, compare_outputs, run_once
from attnlab.replay.replays import Difference
from attnlab.replay.run_call import run_call
from attnlab.replay.variations import VariedCall, varied_calls
from attnlab.tensors.call import KernelCall

TWO_BOUNDS = 2.0  # two correct outputs differ by at most two rounding bounds
CORRUPTION, WRONG, ORDER, NO_CHANGE = (
    "corruption",
    "wrong computation",
    "reduction order",
    "no change",
)
OnVariation = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """What a variation of the call changed.

    - ``kind``: as in :class:`attnlab.replay.variations.VariedCall`.
    - ``change``: the difference from the first run; its elements differ by more than two bounds. None if it
      did not run, for the ``reason``.
    - ``wrong``: elements that are beyond the bound of the correct output.
    """

    name: str
    kind: str
    change: Difference | None = None
    wrong: int = 0
    reason: str = ""

    @property
    def changes_bits(self) -> bool:
        """Answer whether the variation changed a bit."""
        return self.change is not None and self.change.other_bits > 0

    @property
    def in_bounds(self) -> float:
        """Return the largest change in units of the rounding bound."""
        return 0.0 if self.change is None else self.change.in_bounds

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of strict JSON."""
        change = None if self.change is None else self.change.to_dict()
        facts = {"name": self.name, "kind": self.kind, "wrong": self.wrong, "reason": self.reason}
        return {**facts, "change": change}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Probe(Shown):
    """The variations of a call on one backend, and what they show.

    - ``backend``: the kernels with their version. ``error``: the difference of the first run from the correct
      output; ``from_recorded``: that from the recorded output, or None.
    - ``instability``: that equal runs differ by more than another order of sums explains, or None. The
      variations then end with the one where that showed.
    - ``verdict``: "corruption" (equal runs differ, the output depends on what it must not, or changes by
      more than two rounding bounds), "wrong computation" (it is wrong, and every variation repeats that),
      "reduction order" (bits change within the bound), or "no change". ``conclusion``: one sentence with the
      evidence.
    """

    backend: str
    error: Difference
    from_recorded: Difference | None
    variations: tuple[Variation, ...]
    instability: Instability | None = None
    verdict: str
    conclusion: str

    @property
    def is_wrong(self) -> bool:
        """Answer whether something is wrong."""
        return self.verdict in (CORRUPTION, WRONG)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of strict JSON."""
        recorded = None if self.from_recorded is None else self.from_recorded.to_dict()
        return {
            "backend": self.backend,
            "verdict": self.verdict,
            "conclusion": self.conclusion,
            "error": self.error.to_dict(),
            "from_recorded": recorded,
            "variations": [one.to_dict() for one in self.variations],
            "instability": None if self.instability is None else self.instability.to_dict(),
        }


def probe(
    call: KernelCall,
    backend: Backend,
    case: Case,
    given: tuple[str, ...] = (),
    *,
    on_variation: OnVariation = lambda name, done: None,
) -> Probe:
    """Run a call and its variations on a backend. ``case``, ``given``: as for :func:`where_it_ran`.

    ``on_variation``: called with the name of each before it runs, and how many ran. Raises InvalidCall for a
    call without a reference, and what the backend raises for the call itself.
    """
    check_diagnosable(call)
    call = call.cpu()
    recorded = None if call.rejection else call.output
    call = call.with_buffer()
    on_variation("the call itself", 0)
    first = run_once(call, backend, case, given)
    if first.output is None:
        assert first.failure is not None
        raise first.failure
    output, expected, found = first.output, first.expected, list[Variation]()
    with controlled() as control:
        for number, varied in enumerate(
            varied_calls(call, backend.release, pads=backend.name == "vllm"), 1
        ):
            on_variation(varied.name, number)
            found.append(_ran(varied, first, backend))
            if varied.kind == "repeat" and not backend.is_deterministic:
                control.compare(output, lambda: run_call(call, backend, first.case))
    from_recorded = None
    if recorded is not None:
        from_recorded = compare_outputs(output, recorded, expected, bounds=TWO_BOUNDS)
    error = compare_outputs(first.output, None, expected)
    verdict, conclusion = conclude(error, found)
    if control.found is not None:
        verdict, conclusion = CORRUPTION, f"corruption: {control.found.text}"
    return Probe(
        backend=backend.version,
        error=error,
        from_recorded=from_recorded,
        variations=tuple(found),
        instability=control.found,
        verdict=verdict,
        conclusion=conclusion,
    )


def _ran(varied: VariedCall, first: Ran, backend: Backend) -> Variation:
    """Run a variation and compare it with the first run."""
    assert first.output is not None
    output = first.output.clone()
    try:
        with uncontrolled() if varied.kind == "repeat" else contextlib.nullcontext():
            for call, rows in varied.calls:
                output[rows] = run_call(call, backend, first.case)
    except (InvalidValue, KernelRejected, Unavailable) as error:
        return Variation(name=varied.name, kind=varied.kind, reason=str(error))
    expected: Expected = first.expected
    return Variation(
        name=varied.name,
        kind=varied.kind,
        change=compare_outputs(output, first.output, expected, bounds=TWO_BOUNDS),
        wrong=int((expected.ratio(output) > 1).sum()),
    )


def conclude(error: Difference, variations: Sequence[Variation]) -> tuple[str, str]:
    """Return the verdict, and one sentence that states the evidence for it."""
    changed = [one for one in variations if one.changes_bits]
    foreign = [one for one in changed if one.kind == "foreign"]
    beyond = [one for one in changed if one.in_bounds > TWO_BOUNDS]
    repeated = [one for one in changed if one.kind == "repeat"]
    if repeated and beyond:
        return (
            CORRUPTION,
            f"corruption: identical runs differ, {_size(repeated)}; others {_size(beyond)}",
        )
    if foreign and not repeated:
        return CORRUPTION, f"corruption: the output depends on {_names(foreign)}, {_size(foreign)}"
    if beyond:
        text = f"corruption: {_names(beyond)} gives another output, {_size(beyond)}"
        return CORRUPTION, f"{text}, and another order of sums can change it by 2 at most"
    if error.elements:
        where = f"{error.elements} elements in {error.rows} rows are wrong"
        text = f"wrong computation: {where}, and {_ran_count(variations)} variations repeat them"
        return WRONG, f"{text}; neither corruption nor the order of sums explains that"
    if changed:
        how = "identical runs and other variations" if repeated else _names(changed)
        return (
            ORDER,
            f"reduction order: the bits change with {how}, {_size(changed)}, within rounding",
        )
    return NO_CHANGE, f"no change: {_ran_count(variations)} variations give the same bits"


def _names(variations: Sequence[Variation]) -> str:
    return ", ".join(one.name for one in variations)


def _size(variations: Sequence[Variation]) -> str:
    return f"by up to {max(one.in_bounds for one in variations):.3g} rounding bounds"


def _ran_count(variations: Sequence[Variation]) -> int:
    return sum(one.change is not None for one in variations)
