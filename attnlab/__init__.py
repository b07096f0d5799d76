"""attnlab: find out why a paged-attention kernel, or the test of one, is wrong.

The names in ``__all__`` are public and loaded when they are first used; everything else is private.
"""

import importlib as _importlib
import os as _os
import typing as _typing

from attnlab.case import errors as _extras
from attnlab.case import shown as _shown

if _typing.TYPE_CHECKING:
    from attnlab.case.case import Case
    from attnlab.case.errors import AttnLabError, InvalidCase, Unavailable
    from attnlab.checker.check import check
    from attnlab.checker.matrix import run_many
    from attnlab.contracts.dispatch import explain
    from attnlab.defects import DEFECTS
    from attnlab.diagnosis.captured import diagnose_any as diagnose
    from attnlab.diagnosis.captured import violations_of as violations
    from attnlab.kernels.triton.interpreter import interpret
    from attnlab.lab.lab import Lab, compare, decode_error, reference, run, stages
    from attnlab.lab.result import Result
    from attnlab.lab.writes import check_writes
    from attnlab.mla.faults import MLA_FAULTS
    from attnlab.mla.mla_case import MlaCase
    from attnlab.mla.run import check_mla, run_mla
    from attnlab.mutation.power import power
    from attnlab.recorder.capture import capture
    from attnlab.recorder.dumps import read_call
    from attnlab.replay.probe import probe_call
    from attnlab.replay.replay_call import replay_call
    from attnlab.replay.shrinking import shrink_call
    from attnlab.show.notebook import Verdicts
    from attnlab.show.panels import explorer, panel
    from attnlab.show.plot import plot
    from attnlab.tensors.call import KernelCall
    from attnlab.weights.conclude import xray

__version__ = "0.1.0"
__all__ = [
    "DEFECTS",
    "MLA_FAULTS",
    "AttnLabError",
    "Case",
    "InvalidCase",
    "KernelCall",
    "Lab",
    "MlaCase",
    "Result",
    "Unavailable",
    "Verdicts",
    "capture",
    "check",
    "check_mla",
    "check_writes",
    "compare",
    "decode_error",
    "diagnose",
    "explain",
    "explorer",
    "interpret",
    "panel",
    "plot",
    "power",
    "probe_call",
    "read_call",
    "reference",
    "replay_call",
    "run",
    "run_many",
    "run_mla",
    "shrink_call",
    "stages",
    "violations",
    "xray",
]
_PLACES = {  # of each public name: its module, and its name there if that differs
    "DEFECTS": "attnlab.defects",
    "MLA_FAULTS": "attnlab.mla.faults",
    "AttnLabError": "attnlab.case.errors",
    "Case": "attnlab.case.case",
    "InvalidCase": "attnlab.case.errors",
    "KernelCall": "attnlab.tensors.call",
    "Lab": "attnlab.lab.lab",
    "MlaCase": "attnlab.mla.mla_case",
    "Result": "attnlab.lab.result",
    "Unavailable": "attnlab.case.errors",
    "Verdicts": "attnlab.show.notebook",
    "capture": "attnlab.recorder.capture",
    "check": "attnlab.checker.check",
    "check_mla": "attnlab.mla.run",
    "check_writes": "attnlab.lab.writes",
    "compare": "attnlab.lab.lab",
    "decode_error": "attnlab.lab.lab",
    "diagnose": "attnlab.diagnosis.captured:diagnose_any",
    "explain": "attnlab.contracts.dispatch",
    "explorer": "attnlab.show.panels",
    "interpret": "attnlab.kernels.triton.interpreter",
    "panel": "attnlab.show.panels",
    "plot": "attnlab.show.plot",
    "power": "attnlab.mutation.power",
    "probe_call": "attnlab.replay.probe",
    "read_call": "attnlab.recorder.dumps",
    "reference": "attnlab.lab.lab",
    "replay_call": "attnlab.replay.replay_call",
    "run": "attnlab.lab.lab",
    "run_many": "attnlab.checker.matrix",
    "run_mla": "attnlab.mla.run",
    "shrink_call": "attnlab.replay.shrinking",
    "stages": "attnlab.lab.lab",
    "violations": "attnlab.diagnosis.captured:violations_of",
    "xray": "attnlab.weights.conclude",
}

# A full-size cache has hundreds of megabytes, and the kernel's page faults take longer than filling it.
# torch uses huge pages if this is set before its first tensor.
_os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# OpenMP's threads spin while they wait, and on a busy machine they take the processor from the one they wait
# for. They sleep if this is set before torch is imported.
_os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def __getattr__(name: str) -> _typing.Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module 'attnlab' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    with _extras.named_extra(f"attnlab.{name}"):
        value = getattr(_importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]


def _load_sheets() -> _typing.Any:
    return _importlib.import_module("attnlab.show.sheets")


_shown.set_renderer(_load_sheets)
