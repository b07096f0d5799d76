"""The rows of a covering design, kept in the cache folder: covertable needs seconds for many knobs."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

from attnlab.case.errors import Unavailable
from attnlab.checker.design import Design, Row
from attnlab.kernels.cache_folder import private_folder, writing


def design_rows(design: Design, seed: int) -> list[Row]:
    """Return the rows of a design, from the cache folder if they were made before."""
    knobs = {knob: list(values) for knob, values in design.values.items()}
    inputs = [knobs, sorted(map(str, design.refused)), seed, version("covertable")]
    name = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    try:
        file = private_folder("designs") / f"{name}.json"
        if not file.is_file():
            _write(file, list(design.rows(seed)))
        rows: list[Row] = json.loads(file.read_text())
    except Unavailable:  # no folder can be written
        return list(design.rows(seed))
    return rows


def _write(file: Path, rows: list[Row]) -> None:
    """Write the rows in one step, so that other processes read all of them or none."""
    with writing():
        partial = file.with_suffix(f".{hashlib.sha256(repr(rows).encode()).hexdigest()[:8]}")
        partial.write_text(json.dumps(rows))
        partial.replace(file)
