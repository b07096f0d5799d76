"""attnlab: find out why a paged-attention kernel, or the test of one, is wrong."""

import importlib
import os
from typing import Any

from attnlab.case.shown import set_renderer

__version__ = "0.1.0"

# A full-size cache is hundreds of megabytes; in pages of 4 KiB the kernel spends longer on handing them
# out than torch on filling them. torch asks for huge pages where this is set, from its first tensor on.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _sheets() -> Any:
    return importlib.import_module("attnlab.show.sheets")


set_renderer(_sheets)
