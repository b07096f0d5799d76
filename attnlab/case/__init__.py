"""Case, the configuration of one attention call, and what describes one without tensors (no torch)."""

from attnlab.case.case import Case, Lengths
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import AttnLabError, InvalidCall, InvalidCase, Unavailable
from attnlab.case.ops import OPS, Op
from attnlab.case.platforms import PLATFORMS, STAGES, Platform, Stage

__all__ = [
    "FIELDS",
    "OPS",
    "PLATFORMS",
    "STAGES",
    "AttnLabError",
    "Case",
    "InvalidCall",
    "InvalidCase",
    "Lengths",
    "Op",
    "Platform",
    "Stage",
    "Unavailable",
    "field_type",
]
