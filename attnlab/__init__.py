"""attnlab: find out why a paged-attention kernel, or the test of one, is wrong."""

import os

__version__ = "0.1.0"

# A full-size cache is hundreds of megabytes; in pages of 4 KiB the kernel spends longer on handing them
# out than torch on filling them. torch asks for huge pages where this is set, from its first tensor on.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
