"""Notebooks that are planted: small ones, each for one way to end; and the claims of the study."""

import functools
from pathlib import Path
from typing import Any

SEGFAULT = "import ctypes; ctypes.string_at(0)"
OOM_KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
VERDICTS = "from attnlab.show.notebook import Verdicts\nverdicts = Verdicts()\n"


def write_notebook(path: Path, title: str, *sources: str, parameters: str | None = None) -> Path:
    """Write a notebook of a title and code cells, and return its path."""
    from nbformat import v4, write

    cells = [v4.new_markdown_cell(f"# {title}")]
    if parameters:
        cells.append(v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells += [v4.new_code_cell(source) for source in sources]
    spec = {"name": "python3", "language": "python", "display_name": "Python 3"}
    write(v4.new_notebook(cells=cells, metadata={"kernelspec": spec}), path)
    return path


@functools.cache
def judged(number: str) -> Any:
    """Judge a claim of the study once in this process; return the Finding."""
    from study.claims import LEDGER

    (entry,) = (one for one in LEDGER if one.claim.number == number)
    return entry.judge(entry.claim)


NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


SMALL = {"num_heads": 8, "draw_max_query_len": 96, "draw_max_ctx_len": 300}
