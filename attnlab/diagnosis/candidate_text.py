"""Candidates as cells of a table and as values of JSON, and the conclusion of an X-ray as such."""

import dataclasses
from typing import Any

from attnlab.case.json import json_number
from attnlab.diagnosis.candidates import Candidate
from attnlab.weights.xray import XRay

CANDIDATE_COLUMNS = (
    "candidate",
    "predicted",
    "observed",
    "residual",
    "residual / bound",
    "verdict",
    "scope",
)


def candidate_cells(candidate: Candidate) -> list[str]:
    """Return a candidate as the cells of a table with ``CANDIDATE_COLUMNS``."""
    numbers = (candidate.predicted, candidate.observed, candidate.residual, candidate.ratio)
    linked = f" (violation: {', '.join(candidate.linked)})" if candidate.linked else ""
    return [
        candidate.name,
        *(f"{value:.3g}" for value in numbers),
        candidate.verdict + linked,
        "" if candidate.scope is None else candidate.scope.text,
    ]


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON-able values."""
    values = {f.name: getattr(candidate, f.name) for f in dataclasses.fields(candidate)}
    del values["defect"]
    if candidate.scope is not None:
        values["scope"] = dataclasses.asdict(candidate.scope)
    return {
        name: json_number(value) if isinstance(value, float) else value
        for name, value in values.items()
    }


def xray_dict(found: XRay) -> dict[str, Any]:
    """Return the conclusion of an X-ray; ``attnlab xray --json`` has the weights."""
    return {
        "status": found.status,
        "descriptions": [one.to_dict() for one in found.descriptions],
        "confirmed": found.confirmed,
        "sentences": list(found.sentences),
    }
