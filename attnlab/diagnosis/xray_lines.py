"""Lines of a kernel that compute what an X-ray finds wrong: by the data flow of the source, and by loads."""

import re
from collections.abc import Iterator

import torch

from attnlab.diagnosis.kernel_trials import Trials
from attnlab.kernels.triton.kernel_text import statement_texts
from attnlab.kernels.triton.probe import Line
from attnlab.kernels.triton.roles import overwriting, roles
from attnlab.kernels.triton.trace import Region, Watched
from attnlab.tensors.call import KernelCall
from attnlab.weights.xray import XRay

# What lines a rule of an X-ray is about: roles of attnlab.kernels.triton.roles, the likeliest first.
_ROLES = {
    "KeyTimes": ("mask", "bounds"),
    "NoKeys": ("mask", "output", "bounds", "place"),
    "ZeroKeys": ("mask", "update", "carried"),
    "ScoreFactor": ("score", "address"),
    "Power": ("score", "update", "carried"),
    "AlibiFactor": ("score",),
    "AlibiOrigin": ("score", "mask"),
    "SlopeOf": ("score", "address"),
    "Softcap": ("score",),
    "MaskCapped": ("score", "mask"),
    "NotRescaled": ("update", "carried", "output"),
    "LoopBase": ("update", "score", "carried"),
    "Sinks": ("update", "carried", "output"),
    "Gain": ("output", "update", "carried", "score"),
    "OtherSlots": ("address",),
    "KeyHead": ("address",),
    "TileTimes": ("bounds", "mask", "update"),
    "HeadScore": ("address", "score"),
    "HeadGain": ("output", "address", "update"),
}
_ANY = ("score", "update", "output", "address", "carried", "mask", "bounds", "place")
_WORDS = {
    "mask": "a mask",
    "bounds": "the range of a loop",
    "address": "the address of a load",
    "score": "the scores",
    "update": "what a loop carries",
    "carried": "what updates a value that a loop carries",
    "output": "what is stored",
    "place": "the address of a store",
}
_OF_ROLE = 0.5  # steps of data flow by which lines of the next role of a rule are later
_OF_WORD = 1.5  # steps by which lines are earlier that have a name with a word of the rule
_WORD = re.compile(r"[a-z]{4,}")
Found = tuple[Line, str, str]  # line, evidence, reason


def lines_of_xray(trials: Trials, call: KernelCall | None, found: XRay | None) -> list[Found]:
    """Return lines with their evidence, "load" or "role"; none without an X-ray.

    ``call``: the call of the trials, None if the X-ray is of another one.
    """
    if found is None:
        return []
    is_wrong = found.status in ("described", "undecided")
    loads = [] if call is None or not is_wrong else list(_loads(trials, call, found))
    return [*_of_overwriting(trials), *loads, *_of_roles(trials, found)]


def _of_overwriting(trials: Trials) -> Iterator[Found]:
    """Yield the executed lines that replace a value which was computed and not used."""
    for kernel in trials.kernels:
        for number in sorted(overwriting(kernel.text) & kernel.executed):
            yield kernel.line(number), "role", "it replaces a value that was computed and not used"


def _of_roles(trials: Trials, found: XRay) -> list[Found]:
    """Return the executed lines of the roles that the X-ray is about, those nearest by data flow first.

    Of equally near lines, those of the first role come first, and those that share a word with the rule.
    """
    ranked: dict[Line, tuple[float, str]] = {}
    for order, (role, why) in enumerate(_wanted(found).items()):
        words = set(_WORD.findall(why.lower().replace("soft cap", "softcap")))
        for kernel in trials.kernels:
            texts = statement_texts(kernel.text)
            for number, distance in roles(kernel.text)[role].items():
                if number not in kernel.executed:
                    continue
                is_named = not words.isdisjoint(re.split(r"[^a-z]+", texts[number].lower()))
                cost = distance + _OF_ROLE * order - (_OF_WORD if is_named else 0.0)
                text = f"it feeds {_WORDS[role]}; X-ray: {why}"
                line = kernel.line(number)
                ranked[line] = min(ranked.get(line, (cost, text)), (cost, text))
    order_of = sorted(ranked.items(), key=lambda one: (one[1][0], one[0]))
    return [(line, "role", text) for line, (_, text) in order_of]


def _wanted(found: XRay) -> dict[str, str]:
    """Return the roles that an X-ray is about, with the reason, the likeliest first."""
    wanted: dict[str, str] = {}
    for description in found.descriptions:
        for rule in description.rules:
            for role in _ROLES.get(type(rule).__name__, ()):
                wanted.setdefault(role, rule.text)
    return wanted or dict(_by_weights(found))


def _by_weights(found: XRay) -> Iterator[tuple[str, str]]:
    """Yield the roles that the weights themselves show, if there is no rule."""
    extra, missing = _extra(found), _missing(found)
    if bool(found.measurement.unwritten.any()):
        yield from ((role, "rows are not written") for role in ("place", "bounds"))
    elif found.status == "right":
        what = "the weights are right and the output is not"
        yield from ((role, what) for role in ("address", "output", "place"))
    elif found.status == "unreadable":
        yield from ((role, "the output is not finite") for role in _ANY)
    elif bool(extra.any()) or bool(missing.any()):
        what = "keys count that must not" if bool(extra.any()) else "keys do not count that must"
        yield from ((role, what) for role in ("mask", "bounds", "address"))
    else:
        yield from ((role, "keys have other weights") for role in _ANY)


def _floor(found: XRay) -> torch.Tensor:
    return 8 * found.setup.fixed[:, None, None]


def _extra(found: XRay) -> torch.Tensor:
    """Return which weights must be 0 and are not, [R, H, N] bool."""
    return (found.expected == 0) & (found.weights.abs() > _floor(found))


def _missing(found: XRay) -> torch.Tensor:
    return (found.expected > 16 * _floor(found)) & (found.weights.abs() <= _floor(found))


def _loads(trials: Trials, call: KernelCall, found: XRay) -> Iterator[Found]:
    """Yield the lines that load slots of the cache that count although they must not."""
    extra = _extra(found)[..., : found.setup.cache_slots]
    done = set[Line]()
    for row, _, slot in extra.nonzero().tolist()[:200]:
        at, seq = int(found.setup.rows[row]), int(found.setup.seq[row])
        kind = found.owners.kind(slot, seq, int(found.setup.position[row]))
        for line in _loading(trials, call, at, slot):
            if line not in done:
                done.add(line)
                yield (
                    line,
                    "load",
                    f"it loads slot {slot} for row {at}, which must not count: it is {kind}",
                )


def _loading(trials: Trials, call: KernelCall, row: int, slot: int) -> Iterator[Line]:
    """Yield the lines that load a slot of the cache in programs that write a row."""
    watched = Watched.of(call)
    for unit in trials.suspects:
        if trials.wrong_units and not bool(unit.cells[row].any()):
            continue
        for index, log in unit.programs:
            arguments = trials.replay.launches[index].arguments
            tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
            dims = {name: watched.dims(tensor) for name, tensor in tensors.items()}
            caches = [
                Region.of(name, tensors[name], found)
                for name, found in dims.items()
                if found is not None and len(found) == 2
            ]
            for line, parts in log.loads.items():
                if any(slot in cache.indices(part) for cache in caches for part in parts):
                    yield line
