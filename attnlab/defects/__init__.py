"""The catalogue of defects, each a way for a kernel or its caller to be wrong.

A mutation report asks which defects a test would notice; a diagnosis asks which defect explains an
output. Not covered: races, compiler bugs, and reduced-precision products, because no transformation of
the reference reproduces them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from attnlab.defects.edit import Defect
from attnlab.defects.masks import BIDIRECTIONAL, BRANCHES, MASKS, TOKENS
from attnlab.defects.reads import DECODING, HEADS, READS, ROWS
from attnlab.defects.scores import PARTITIONS, SCORES, SINKS, SOFTCAP, SOFTMAX

_FAMILIES = (
    *(MASKS, BIDIRECTIONAL, BRANCHES, PARTITIONS, SOFTMAX, TOKENS, SCORES, SINKS, SOFTCAP, HEADS),
    *(READS, DECODING, ROWS),
)
DEFECTS: Mapping[str, Defect] = MappingProxyType(
    {defect.name: defect for family in _FAMILIES for defect in family}
)

__all__ = ["DEFECTS", "Defect"]
