"""Diagnose a call without a Case: where it ran, which kernels served it, and what stays unknown."""

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.case.ops import MERGE, RELEASES
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.target import Target
from attnlab.contracts.violation import Violations
from attnlab.contracts.violations import find_violations
from attnlab.diagnosis.diagnose import diagnose_call
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.write_diagnosis import diagnose_write
from attnlab.tensors.call import KernelCall
from attnlab.tensors.origin import STOCK_BFLOAT16

_FP8_PLATFORM = "FP8 format and choice of kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Where a call ran: ``case`` has its platform, release and switches. ``assumed`` names, in words, those
    that neither the call nor the user stated."""

    case: Case
    assumed: tuple[str, ...] = ()


def diagnose_captured(
    call: KernelCall,
    case: Case,
    *,
    given: Collection[str] = (),
    output: torch.Tensor | None = None,
) -> Diagnosis:
    """Diagnose a call that ran somewhere else. ``case`` and ``given``: as for :func:`where_it_ran`.

    Arguments that attnlab does not know leave what they may change undecided. Raises InvalidCall for a call
    that is no attention, has arguments without a reference, or has no output.
    """
    check_diagnosable(call, writes=True, unknown=True)
    if call.origin.backend == STOCK_BFLOAT16 and output is None:
        raise InvalidCall(
            f"not decided: {STOCK_BFLOAT16}, which takes the bits of these numbers for integers, so the "
            "output says nothing about the kernel; attnlab computes bfloat16 if it runs the kernel: "
            "attnlab check FILE.py:FUNCTION"
        )
    ran = where_it_ran(call, case, given)
    if call.rejection and output is None:
        return Diagnosis(
            status="rejected",
            rejection=call.rejection,
            violations=violations_of_captured(call, case, given=given),
        )
    if call.spec.writes_cache:
        found = diagnose_write(call, Target.of(ran.case), output=output)
        found = dataclasses.replace(found, unknown=[*found.unknown, *ran.assumed])
        return _undecided(found, call)
    found = diagnose_call(
        call,
        Target.of(ran.case),
        kernels_of(ran.case, call),
        output=output,
        unknown=unknown_about(call, ran),
    )
    return _undecided(found, call)


def _undecided(found: Diagnosis, call: KernelCall) -> Diagnosis:
    """Return what of a diagnosis does not depend on arguments that attnlab does not know."""
    if not call.unknown_arguments:
        return found
    return Diagnosis(
        status="not decided",
        undecided_by=call.unknown_arguments,
        wrong_rows=found.wrong_rows,
        largest=found.largest,
        looked_at=found.looked_at,
        violations=found.violations,
        unknown=found.unknown,
        seconds=found.seconds,
    )


def violations_of_captured(
    call: KernelCall, case: Case, *, given: Collection[str] = ()
) -> Violations:
    """Return where a call that ran somewhere else violates contracts.

    There are none of an op without a record and of a cache write.
    """
    if call.is_foreign or call.spec.writes_cache:
        return Violations()
    ran = where_it_ran(call, case, given)
    return find_violations(call.cpu(), Target.of(ran.case), kernels_of(ran.case, call))


def check_diagnosable(call: KernelCall, *, writes: bool = False, unknown: bool = False) -> None:
    """Raise InvalidCall for a call that has no reference here.

    ``writes``: a cache write has one. ``unknown``: a call with arguments that attnlab does not know may pass.
    """
    if (call.spec.writes_cache and not writes) or call.op == MERGE:
        raise InvalidCall(f"op must be an attention op to be diagnosed, got {call.op}", field="op")
    if call.unmodelled:
        text = ", ".join(call.unmodelled)
        raise InvalidCall(f"call must be without what attnlab has no reference for, got {text}")
    if call.unknown_arguments and not unknown:
        text = ", ".join(call.unknown_arguments)
        raise InvalidCall(f"call must be without arguments that attnlab does not know, got {text}")


def where_it_ran(call: KernelCall, case: Case, given: Collection[str] = ()) -> Ran:
    """Return the Case with the platform and the release of the call's origin.

    ``given`` names the fields of ``case`` that the user stated; they win.
    """
    origin, changes, assumed = call.origin, {}, []
    if "platform" not in given:
        if origin.platform in PLATFORMS:
            changes["platform"] = origin.platform
        else:
            reason = "" if origin.platform is None else f" instead of {origin.platform}"
            assumed.append(f"the platform: {case.platform}{reason} ({_FP8_PLATFORM})")
    if "release" not in given and not call.is_foreign:
        changes["release"] = case.release if origin.release is None else _nearest(origin.release)
        if changes["release"] != origin.release:
            reason = "" if origin.release is None else f" instead of {origin.release}"
            assumed.append(f"the release: vLLM {changes['release']}{reason} (contracts)")
    return Ran(case=case.replace(**changes), assumed=tuple(assumed))


def _nearest(release: str) -> str:
    """Return the modelled release whose contracts fit best: the newest that is not newer, or the oldest."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    older = [one for one in RELEASES if tuple(map(int, one.split("."))) <= numbers]
    return older[-1] if older else RELEASES[0]


def unknown_about(call: KernelCall, ran: Ran) -> list[str]:
    """Return what a diagnosis of the call cannot conclude, each in one sentence."""
    found = [
        "which tokens the cache holds: a wrong cache write or block table is not found, because the "
        "context is taken as the cache holds it"
    ]
    if call.new_tokens != "given":
        found.append("the new keys and values: they are taken from the cache")
    if call.before is None and not call.is_foreign:
        found.append(
            "the output buffer before the call: unwritten rows are found by the contracts alone"
        )
    found += [f"whether the form is right: {text}" for text in call.read_as]
    if call.is_foreign:
        found.append(f"the contracts of {call.origin.op}: no violations are looked for")
    return [*found, *ran.assumed]
