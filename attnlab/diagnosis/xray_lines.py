"""Lines of a kernel that compute what an X-ray finds wrong: by the data flow of the source, and by loads."""

from collections.abc import Iterator

import torch

from attnlab.diagnosis.kernel_trials import Trials
from attnlab.kernels.triton.probe import Line
from attnlab.kernels.triton.roles import roles
from attnlab.kernels.triton.trace import Region, Watched
from attnlab.tensors.call import KernelCall
from attnlab.weights.xray import XRay

# What lines a rule of an X-ray is about: roles of attnlab.kernels.triton.roles, the likeliest first.
_ROLES = {
    "KeyTimes": ("mask", "bounds"),
    "NoKeys": ("mask", "bounds"),
    "ZeroKeys": ("mask", "update", "carried"),
    "ScoreFactor": ("score",),
    "Power": ("score", "update", "carried"),
    "AlibiFactor": ("score",),
    "AlibiOrigin": ("score", "mask"),
    "SlopeOf": ("score", "address"),
    "Softcap": ("score",),
    "MaskCapped": ("score", "mask"),
    "NotRescaled": ("update", "carried", "output"),
    "Sinks": ("update", "carried", "output"),
    "Gain": ("output", "update", "carried", "score"),
    "OtherSlots": ("address",),
    "KeyHead": ("address",),
}
_WORDS = {
    "mask": "a mask",
    "bounds": "the range of a loop",
    "address": "the address of a load",
    "score": "the scores",
    "update": "what a loop carries",
    "carried": "what updates a value that a loop carries",
    "output": "what is stored",
}
Found = tuple[Line, str, str]  # line, evidence, reason


def lines_of_xray(trials: Trials, call: KernelCall | None, found: XRay | None) -> list[Found]:
    """Return lines with their evidence, "load" or "role"; none without an X-ray that finds a fault.

    ``call``: the call of the trials, None if the X-ray is of another one.
    """
    if found is None or found.status not in ("described", "undecided"):
        return []
    loads = [] if call is None else _loads(trials, call, found)
    return [*loads, *_of_roles(trials, found)]


def _of_roles(trials: Trials, found: XRay) -> Iterator[Found]:
    """Yield the executed lines of the roles that the rules of the X-ray are about."""
    wanted = list(_by_weights(found))
    for description in found.descriptions:
        for rule in description.rules:
            wanted += [(role, rule.text) for role in _ROLES.get(type(rule).__name__, ())]
    reasons: dict[str, str] = {}
    for role, why in wanted:
        reasons.setdefault(role, why)
    for role, why in reasons.items():
        for kernel in trials.kernels:
            for number in sorted(roles(kernel.text)[role] & kernel.executed):
                yield kernel.line(number), "role", f"it feeds {_WORDS[role]}; X-ray: {why}"


def _by_weights(found: XRay) -> Iterator[tuple[str, str]]:
    """Yield the roles that the weights themselves show, if there is no description."""
    if found.descriptions:
        return
    extra, missing = _extra(found), _missing(found)
    if bool(extra.any()) or bool(missing.any()):
        what = "keys count that must not" if bool(extra.any()) else "keys do not count that must"
        yield from ((role, what) for role in ("mask", "bounds", "address"))
        return
    yield from (
        (role, "keys have other weights")
        for role in ("score", "address", "update", "carried", "output")
    )


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
    for unit in trials.wrong_units:
        if not bool(unit.cells[row].any()):
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
