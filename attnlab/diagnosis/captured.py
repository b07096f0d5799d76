"""Diagnose a call without a Case: where it ran, which kernels served it, and what stays unknown."""

import dataclasses
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from attnlab.case.case import Case, as_case
from attnlab.case.errors import AttnLabError, DeviceLost, InvalidCall
from attnlab.case.fields import refuse
from attnlab.case.ops import RELEASES
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import kernels_of
from attnlab.contracts.violations import Violations, find_violations
from attnlab.diagnosis.claims import ConfirmedRule
from attnlab.diagnosis.confirmation import is_general, rules_of
from attnlab.diagnosis.decision import examine, withdraw
from attnlab.diagnosis.diagnose import diagnose, diagnose_call, if_stable
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.trials import FULL, Limit
from attnlab.diagnosis.written_cache import diagnose_write
from attnlab.kernels.backend import Backend, OnStep
from attnlab.kernels.control import (
    MOST_RUNS,
    controlled,
    rows_close,
    rows_equal,
    uncontrolled,
)
from attnlab.kernels.run_call import for_call, run_call
from attnlab.kernels.runner import one_backend
from attnlab.lab.call_lab import CallLab, call_lab
from attnlab.lab.lab import Lab, default_lab
from attnlab.lab.problem import Problem
from attnlab.tensors.call import STOCK_BFLOAT16, KernelCall
from attnlab.tensors.call_file import is_call_file
from attnlab.tensors.formats import same_numbers

# Diagnose an output of a Case that a file holds.


def diagnose_file(case: Case, lab: Lab, output: Path | None, *, locate: bool = True) -> Diagnosis:
    """Diagnose the output in a file, or else the Case's own run.

    ``locate``: look for the source lines of a fault of the run.
    Raises InvalidCall if the file does not hold what it should.
    """
    if output is not None:
        return diagnose(case, load_output(output), lab=lab)
    return diagnose(case, lab=lab, limit=FULL if locate else None)


def load_output(path: Path) -> torch.Tensor:
    """Load the tensor "output" from a safetensors file, or the output of a saved call."""
    if is_call_file(path):
        return KernelCall.load(path).buffer
    try:
        with safe_open(path, framework="pt") as file:
            output: torch.Tensor = file.get_tensor("output")
    except (OSError, SafetensorError) as error:
        raise InvalidCall(
            f"{path} must be a safetensors file with a tensor output: {error}"
        ) from error
    return output


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
    runner: Backend | None = None,
    limit: Limit | None = FULL,
    on_step: OnStep | None = None,
) -> Diagnosis:
    """Diagnose a call that ran somewhere else. ``case`` and ``given``: as for :func:`where_it_ran`.

    - ``runner``: what computed the output. With it, the diagnosis is that of a Case with the call's tensors
      (:mod:`attnlab.lab.call_lab`): reruns, varied Cases, X-ray and source lines. Without it, or if no Case
      has the call's arguments, it rests on the call alone, and says so.
    - ``limit``: of the search for source lines, None for none. ``on_step``: called before each step.

    Arguments that attnlab does not know leave what they may change undecided. Raises InvalidCall for a call
    that is no attention, has arguments without a reference, or has no output.
    """
    check_diagnosable(call, writes=True, unknown=True)
    ran = where_it_ran(call, case, given)
    if call.origin.backend == STOCK_BFLOAT16 and output is None:
        if runner is None:
            return Diagnosis(status="not decided", rejection=_OF_STOCK)
        output = run_call(call.cpu(), runner, ran.case)
        own = dataclasses.replace(call, origin=dataclasses.replace(call.origin, backend=None))
        found = diagnose_captured(
            own, case, given=given, output=output, runner=runner, limit=limit, on_step=on_step
        )
        return dataclasses.replace(found, diagnosed=_OF_ATTNLAB)
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
    if call.unknown_arguments:
        return _undecided(found, call)
    if not found.is_wrong and runner is None:
        return found
    if runner is None:
        return _with_unknown(found, NO_RUNNER)
    call = call.cpu() if output is None else dataclasses.replace(call.cpu(), output=output.cpu())
    runner = for_call(call, runner)
    where = ran.case if "release" in given else ran.case.replace(release=runner.release)
    return _with_runner(call, where, runner, found, limit, on_step)


_OF_STOCK = (
    f"{STOCK_BFLOAT16}, which takes the bits of these numbers for integers, so the output says nothing about "
    "the kernel; attnlab computes bfloat16 if it runs the kernel: give --kernel FILE.py:FUNCTION"
)
_OF_RUNNER = (
    "the recorded output is right: what is explained is the output of {} for the same arguments"
)
_OF_ATTNLAB = f"what is explained is attnlab's own output: the recorded one is of {STOCK_BFLOAT16}"
NO_RUNNER = (
    "what runs of the kernel would show: no kernel is given, so there are no reruns, no varied calls, no "
    "X-ray and no source lines"
)


def _with_unknown(found: Diagnosis, *texts: str) -> Diagnosis:
    return dataclasses.replace(found, unknown=[*found.unknown, *texts])


def _with_runner(
    call: KernelCall,
    ran: Case,
    runner: Backend,
    alone: Diagnosis,
    limit: Limit | None,
    on_step: OnStep | None,
) -> Diagnosis:
    """Return the diagnosis of a call by runs of its kernel; ``alone`` is that without any.

    A runner that gives another output for the call says nothing about the recorded one.
    """
    began, runs_show = time.perf_counter(), f"what runs of {runner.version} would show"
    try:
        lab = call_lab(call, ran, runner, on_step=on_step)
    except AttnLabError as error:
        return _by_varied_calls(call, ran, runner, alone, str(error))
    try:
        with uncontrolled():
            output = lab.output(lab.case).cpu()
    except AttnLabError as error:
        return _with_unknown(alone, f"{runs_show}: {error}")
    other = _other_rows(lab, output)
    if other:
        with controlled() as control:
            runs = 1 if runner.is_deterministic else MOST_RUNS
            control.compare(output, lambda: lab.output(lab.case).cpu(), least=runs)
        if control.found is not None:
            return if_stable(alone, alone, control)
        is_wrong = examine(_on_cpu(lab), lab.case, output, (), Pattern()).diagnosis.is_wrong
        if is_wrong and not alone.is_wrong:  # what was recorded needs none: the kernel does
            own = dataclasses.replace(call, output=output)
            found = _with_runner(own, ran, runner, alone, limit, on_step)
            return dataclasses.replace(found, diagnosed=_OF_RUNNER.format(runner.version))
        which = f"another wrong output, in {other} rows" if is_wrong else "the right output"
        text = f"whether {runner.version} is at fault: run on this call, it gives {which}"
        return _with_unknown(alone, text)
    try:
        found = diagnose(lab.case, lab=lab, limit=limit)
    except (torch.AcceleratorError, DeviceLost) as error:
        text = f"a varied call broke the GPU's context: {str(error).splitlines()[0]}"
        return _with_unknown(alone, f"{runs_show}: {text}")
    unknown = [text for text in alone.unknown if text != UNKNOWN_BUFFER]
    if call.is_foreign:
        found = dataclasses.replace(found, violations=Violations())
    return dataclasses.replace(
        found, tolerance=None, unknown=unknown, seconds=time.perf_counter() - began
    )


def _by_varied_calls(
    call: KernelCall, ran: Case, runner: Backend, alone: Diagnosis, why: str
) -> Diagnosis:
    """Return the diagnosis of a call that no Case states, by runs of it and of calls with other contents.

    Explanations must hold for the varied calls, too; without one, a rule beyond the catalogue that holds for
    all of them describes the output. ``why``: the field that no Case has.
    """
    found = _with_unknown(
        alone,
        f"what other lengths, an X-ray and source lines would show: no Case has this call: {why}",
    )
    try:
        with controlled() as control:
            found = _confirmed_by_calls(call, ran, runner, found)
    except AttnLabError as error:
        return _with_unknown(found, f"what runs of {runner.version} would show: {error}")
    return found if control.found is None else if_stable(found, found, control)


def _confirmed_by_calls(
    call: KernelCall, ran: Case, runner: Backend, alone: Diagnosis
) -> Diagnosis:
    """Return a diagnosis with what runs of the call, in place and with other contents, confirm."""
    target, kernels = Target.of(ran), kernels_of(ran, call)
    output = run_call(call, runner, ran)
    if not bool((rows_equal(output, call.buffer) | rows_close(output, call.buffer)).all()):
        return _with_unknown(
            alone, f"whether {runner.version} is at fault: it gives another output"
        )
    left = alone.explanations
    if not left:
        rules = rules_of(Problem.of_call(call, target, kernels), output)
        found = diagnose_call(call, target, kernels, defects=rules)
        left = [one for one in found.candidates if is_general(one)]
    cases = 0
    for varied in _varied_calls(call):
        given = run_call(varied, runner, ran)
        defects = [one.defect for one in left]
        again = diagnose_call(varied, target, kernels, output=given, defects=defects)
        if again.is_wrong:
            cases += 1
            kept = {one.name for one in again.candidates if one.verdict in _HOLDS}
            left = [one for one in left if one.name in kept]
    if alone.explanations:
        names = {one.name for one in left}
        reason = "{names} does not explain a call with other contents"
        return withdraw(alone, lambda one: one.name not in names, "excluded by rerun", reason)
    if not left or not cases:
        return alone
    only_decodes = call.spec.prefill and bool((call.query_lens <= 1).all())
    rule = ConfirmedRule(candidate=left[0], cases=cases, only_decodes=only_decodes)
    return dataclasses.replace(alone, status="described", rule=rule)


_HOLDS = ("explains", "less likely")  # verdicts of a rule that a further call does not refute
_ODD = 0.73  # a scale of the scores, in units of the call's


def _varied_calls(call: KernelCall) -> Iterator[KernelCall]:
    """Yield calls with other contents and an odd scale: the elements of each head in another order.

    Elements that are not finite stay in their slots.
    """
    generator, size = torch.Generator().manual_seed(7), call.query.shape[2]
    for factor in (1.0, _ODD):
        by_query, by_key = (torch.randperm(size, generator=generator) for _ in range(2))
        by_value = torch.randperm(call.value_cache.shape[2], generator=generator)
        keys = call.key_cache.permute(0, 1, 3, 2, 4)
        shuffled = keys.flatten(3)[..., by_key].unflatten(3, keys.shape[3:]).permute(0, 1, 3, 2, 4)
        yield dataclasses.replace(
            call,
            query=call.query[..., by_query],
            key=call.key[..., by_key],
            value=call.value[..., by_value],
            key_cache=shuffled,
            value_cache=call.value_cache[:, :, by_value],
            sm_scale=None if call.sm_scale is None else call.sm_scale * factor,
        )


_SAME = 4.0  # rounding bounds by which two runs of a kernel may differ, on another device, too


def _other_rows(lab: CallLab, output: torch.Tensor) -> int:
    """Return in how many rows an output of the call differs from the recorded one by more than rounding.

    Rows that keep the contents of the buffer in both are equal.
    """
    lab, case, recorded = _on_cpu(lab), lab.case, lab.given.buffer
    own = lab.call(case)
    right, bound = lab.reference(case).double(), lab.bound(case, own).double()
    both = [one.double() for one in (recorded, output)]
    size = torch.stack(both).abs().amax((0, 3)) / right.abs().amax(2)
    limit = _SAME * bound * size.nan_to_num(1.0).clamp(min=1.0)[..., None]
    near = (both[0] - both[1]).abs() <= limit
    near |= same_numbers(*both)
    kept = rows_equal(output, own.buffer)
    if lab.given.before is not None:
        kept &= rows_equal(recorded, lab.given.before)
    return int((~(near.flatten(1).all(1) | kept)).sum())


def _on_cpu(lab: CallLab) -> CallLab:
    return lab if lab.where(lab.case) == "cpu" else dataclasses.replace(lab, device="cpu")


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
    if call.spec.writes_cache and not writes:
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
    if "release" not in given and not call.is_foreign and call.spec.library == "vllm":
        changes["release"] = case.release if origin.release is None else _nearest(origin.release)
        if changes["release"] != origin.release:
            reason = "" if origin.release is None else f" instead of {origin.release}"
            assumed.append(f"the release: vLLM {changes['release']}{reason} (contracts)")
    return Ran(case=case.replace(**changes), assumed=tuple(assumed))


def problem_of(call: KernelCall, ran: Case | None = None) -> Problem:
    """Return the problem of a call on the CPU. ``ran``: where it ran, None for what its origin says."""
    ran = where_it_ran(call, Case()).case if ran is None else ran
    return Problem.of_call(call, Target.of(ran), kernels_of(ran, call))


def _nearest(release: str) -> str:
    """Return the modelled release whose contracts fit best: the newest that is not newer, or the oldest."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    older = [one for one in RELEASES if tuple(map(int, one.split("."))) <= numbers]
    return older[-1] if older else RELEASES[0]


UNKNOWN_BUFFER = (
    "the output buffer before the call: unwritten rows are found by the contracts alone"
)


def unknown_about(call: KernelCall, ran: Ran) -> list[str]:
    """Return what a diagnosis of the call cannot conclude, each in one sentence."""
    found = [
        "which tokens the cache holds: a wrong cache write or block table is not found, because the "
        "context is taken as the cache holds it"
    ]
    if call.new_tokens != "given":
        found.append("the new keys and values: they are taken from the cache")
    if call.before is None and not call.is_foreign:
        found.append(UNKNOWN_BUFFER)
    found += [f"whether the form is right: {text}" for text in call.read_as]
    if call.is_foreign:
        found.append(f"the contracts of {call.origin.op}: no violations are looked for")
    return [*found, *ran.assumed]


# The part of ``import attnlab`` that finds violations and diagnoses.


def diagnose_any(
    case: Case | KernelCall | str,
    output: torch.Tensor | None = None,
    *,
    lab: Lab | None = None,
    source: Path | str | None = None,
    device: str | None = None,
    locate: bool = True,
    **changes: Any,
) -> Diagnosis:
    """Return which defect explains the output of a Case, of a pytest id's Case, or of a KernelCall.

    - ``output``: [num_tokens, num_heads, head_size]. Default: a Case is run; of a KernelCall it is the
      content of its output buffer.
    - ``source``, ``device``: of a KernelCall, the vLLM that computed it and where it runs, as for
      :func:`attnlab.shrink_call`; ``backend``, one of the changes, is another kernel, such as "mine.py:fn".
      Without them nothing is run, and the report states what is left out. A Case runs in its ``lab``.
    - ``locate``: of a KernelCall with a kernel, look for the source lines, which may take half a minute.
    - ``changes``: fields of the Case. For a KernelCall they name where it ran, for example
      ``platform="sm_90"`` or ``release="0.11.2"``. Default: the call's origin.

    Raises InvalidCall for an output of another shape or dtype.
    """
    if isinstance(case, KernelCall):
        runner = one_backend(source, changes.pop("backend", None), device)
        limit = FULL if locate else None
        return diagnose_captured(
            case, Case(**changes), given=changes, output=output, runner=runner, limit=limit
        )
    for name, value in (("source", source), ("device", device)):
        if value is not None:
            refuse(name, "none for a Case, which runs in its lab", value)
    return diagnose(as_case(case, **changes), output, lab=lab or default_lab())


def violations_of(
    case: Case | KernelCall | str, *, lab: Lab | None = None, **changes: Any
) -> Violations:
    """Return where a call violates the contracts of its kernels, without running them.

    ``changes`` are as for :func:`diagnose`. Of a KernelCall it is not known which slots are written, so
    violations that concern them are not found.
    """
    if isinstance(case, KernelCall):
        return violations_of_captured(case, Case(**changes), given=changes)
    case, lab = as_case(case, **changes), lab or default_lab()
    return lab.violations(case, lab.call(case))
