"""Lines of a kernel that access memory outside its tensors, and what feeds their addresses."""

from collections.abc import Iterable
from pathlib import Path

from attnlab.diagnosis.bad_lines import lines_of
from attnlab.diagnosis.kernel_trials import Trials
from attnlab.kernels.triton.kernel_text import statement_lines
from attnlab.kernels.triton.probe import Line
from attnlab.kernels.triton.roles import slice_of

_MOST_STEPS = 3  # of the data flow to the access


def lines_of_accesses(trials: Trials, outside: Iterable[str]) -> list[tuple[Line, str, str]]:
    """Return lines with the evidence "outside" and the reason, those nearest to an access first.

    ``outside``: texts of bad accesses, "file:line …", as of :class:`attnlab.lab.result.Result`.
    """
    found: dict[Line, tuple[int, int, str]] = {}
    for place in sorted(lines_of(outside)):
        name, _, number = place.rpartition(":")
        for kernel in trials.kernels:
            at = statement_lines(kernel.text).get(int(number) - kernel.first)
            if Path(kernel.file).name != Path(name).name or at is None:
                continue
            for line, distance in slice_of(kernel.text, at).items():
                if distance > _MOST_STEPS or line not in kernel.executed:
                    continue
                why = f"it feeds line {number}, which accesses memory outside its tensors"
                if not distance:
                    why = "it accesses memory outside its tensors"
                one = (distance, abs(line - at), why)  # the last of several values of a name
                found[kernel.line(line)] = min(found.get(kernel.line(line), one), one)
    ranked = sorted(found.items(), key=lambda one: (*one[1][:2], one[0]))
    return [(line, "outside", why) for line, (_, _, why) in ranked]
