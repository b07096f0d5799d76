"""Probe: is a difference corruption, or another order of sums? Runs the variations of a call."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidValue, KernelRejected, Unavailable
from attnlab.case.shown import Document, Shown
from attnlab.diagnosis.captured import check_diagnosable
from attnlab.kernels.backend import Backend
from attnlab.kernels.control import Instability, controlled, uncontrolled
from attnlab.kernels.run_call import run_call
from attnlab.kernels.runner import one_backend
from attnlab.recorder.snapshot import owned_slots
from attnlab.replay.parts import KeptSequence, whole, with_sequences
from attnlab.replay.replay_call import (
    Difference,
    Expected,
    Ran,
    beyond_text,
    bits_text,
    compare_outputs,
    run_once,
)
from attnlab.show.sheets.sheet import Facts, Grid, Lines, Row, Sheet, Tone, Words
from attnlab.tensors.call import KernelCall

# Variations of a call: other batches, splits, sizes, places, foreign contents. None may change the result.
#
# Some of them may change its bits, because sums are added in another order. Others may not change any bit.

_ALONE = 16  # sequences that are run alone, evenly spaced
_SPLITS = (1, 4, 32)
_FINITE = 3.0  # a number in foreign slots
_BUFFER = 7.0  # a number in the output buffer
_ELEMENT = 0x35  # a byte in foreign slots of an FP8 cache; a finite number in every format


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VariedCall:
    """One or more calls that together give rows of the first call's output.

    - ``kind``: "repeat" (the same call), "batch", "splits", "size" (maxima, padding), "place" (other blocks
      of the cache), or "foreign" (contents that the call must neither read nor keep).
    - ``calls``: each with the rows [n] int64 of the first call that it computes.
    """

    name: str
    kind: str
    calls: tuple[tuple[KernelCall, torch.Tensor], ...]


def varied_calls(call: KernelCall, release: str, *, pads: bool) -> Iterator[VariedCall]:
    """Yield the variations of a call that its op permits in a release; ``pads``: the backend can pad."""
    rows = torch.arange(call.query.shape[0])

    def one(name: str, kind: str, **changes: Any) -> VariedCall:
        changed = dataclasses.replace(call, **changes)
        return VariedCall(name=name, kind=kind, calls=((changed, rows),))

    yield one("identical run", "repeat")
    yield from _batches(call)
    if call.spec.num_splits is not None and release in call.spec.split_releases:
        for splits in _SPLITS:
            if splits != call.num_splits:
                yield one(f"{splits} splits", "splits", num_splits=splits)
        if call.spec.min_splits == 0 and call.num_splits != 0:
            yield one("without splits", "splits", num_splits=0)
    yield one("twice the max_seq_len", "size", max_seq_len=2 * call.max_seq_len)
    if pads and not call.padding:
        yield one("3 padding tokens", "size", padding=3)
    yield one("other blocks", "place", **_other_blocks(call))
    yield one("other numbers in foreign slots", "foreign", **_other_slots(call))
    yield one("another output buffer", "foreign", before=torch.full_like(call.buffer, _BUFFER))


def _batches(call: KernelCall) -> Iterator[VariedCall]:
    """Yield each sequence alone, and the sequences in reverse order."""
    every, starts = whole(call), call.query_start_loc.tolist()

    def run(kept: list[KeptSequence]) -> tuple[KernelCall, torch.Tensor]:
        part = with_sequences(call, kept)
        maxima = {name: getattr(call, name) for name in ("max_query_len", "max_seq_len")}
        rows = torch.cat([torch.arange(starts[one.seq], starts[one.seq + 1]) for one in kept])
        return dataclasses.replace(part, **maxima), rows

    full = [one for one in every if one.last]
    if len(every) < 2 or not full:
        return
    step = -(-len(full) // _ALONE)
    alone = tuple(run([one]) for one in full[::step])
    yield VariedCall(name="each sequence alone", kind="batch", calls=alone)
    yield VariedCall(name="sequences reversed", kind="batch", calls=(run(every[::-1]),))


def _other_blocks(call: KernelCall) -> dict[str, Any]:
    """Return the cache with its blocks in reverse order, and the block table that names them there."""
    count = call.key_cache.shape[0]
    table = call.block_table
    inside = (table >= 0) & (table < count)
    changes: dict[str, Any] = {
        "block_table": torch.where(inside, count - 1 - table, table),
        "key_cache": _reversed(call.key_cache),
        "value_cache": _reversed(call.value_cache),
    }
    for name in ("k_scale", "v_scale"):
        scale = getattr(call, name)
        if isinstance(scale, torch.Tensor) and scale.dim() == 3:
            changes[name] = scale.flip(0)
    return changes


def _reversed(cache: torch.Tensor) -> torch.Tensor:
    """Return a copy of a cache with its blocks reversed, in the same order of dimensions."""
    copy = cache.clone()
    copy.copy_(cache.flip(0))
    return copy


def _other_slots(call: KernelCall) -> dict[str, Any]:
    """Return the cache with other finite numbers in the slots that belong to no sequence of the call."""
    changes: dict[str, Any] = {}
    for name, cache in (("key_cache", call.key_cache), ("value_cache", call.value_cache)):
        copy = cache.clone()
        fill = _ELEMENT if cache.dtype == torch.uint8 else _FINITE
        copy.movedim(3, 1)[~owned_slots(call)] = fill
        changes[name] = copy
    return changes


TWO_BOUNDS = 2.0  # two correct outputs differ by at most two rounding bounds
CORRUPTION = "corruption"
WRONG = "wrong computation"
ORDER = "reduction order"
NO_CHANGE = "no change"
OnVariation = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """What a variation of the call changed.

    - ``kind``: as in :class:`attnlab.replay.probe.VariedCall`.
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Probe(Document, Shown):
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


def probe_call(
    call: KernelCall,
    *,
    source: Path | str | None = None,
    backend: str = "model",
    device: str | None = None,
    **changes: Any,
) -> Probe:
    """Decide between corruption and another order of sums: run a call again with variations.

    The variations are: an identical run, each sequence alone, reversed sequences, other split counts, another
    max_seq_len and padding, other blocks, and other contents of foreign slots and of the output buffer.

    ``source``, ``backend``, ``device``, ``changes``: as for :func:`attnlab.shrink_call`.
    """
    name = "vllm" if source is not None and backend == "model" else backend
    found = one_backend(source, name, device)
    assert found is not None
    return probe(call, found, Case(**changes), tuple(changes))


def probe_sheet(one: Probe) -> Sheet:
    """Return what the variations of a call changed."""
    columns = ("variation", "changed bits", "largest change", "wrong elements")
    tone: Tone = "bad" if one.is_wrong else "good"
    return Sheet.of(
        "Probe",
        one.verdict,
        Lines([one.conclusion]),
        Facts(
            [
                ("kernels", one.backend),
                ("first run", f"wrong: {beyond_text(one.error)}"),
                ("recorded bits", bits_text(one.from_recorded)),
            ]
        ),
        Grid(columns, [_variation(each) for each in one.variations], most=16),
        tone=tone,
        line=one.conclusion,
    )


def _variation(one: Variation) -> Row:
    if one.change is None:
        return [one.name, Words(f"cannot run: {one.reason}", "quiet"), "", ""]
    change = one.change
    bits = f"{change.other_bits} of {change.total} elements" if change.other_bits else "none"
    size = f"{change.in_bounds:.3g} bounds" if change.other_bits else ""
    return [one.name, bits, size, one.wrong or "none"]
