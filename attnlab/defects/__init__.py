"""The catalogue of defects, each a way for a kernel or its caller to be wrong.

A mutation report asks which defects a test would notice; a diagnosis asks which defect explains an
output. Not covered: races, compiler bugs, and reduced-precision products, because no transformation of
the reference reproduces them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from attnlab.defects.bidirectional import BIDIRECTIONAL
from attnlab.defects.branches import BRANCHES
from attnlab.defects.decoding import DECODING
from attnlab.defects.defect import Defect
from attnlab.defects.heads import HEADS
from attnlab.defects.masks import MASKS
from attnlab.defects.partitions import PARTITIONS
from attnlab.defects.reads import READS
from attnlab.defects.rows import ROWS
from attnlab.defects.scores import SCORES
from attnlab.defects.sinks import SINKS
from attnlab.defects.softcap import SOFTCAP
from attnlab.defects.softmax import SOFTMAX
from attnlab.defects.tokens import TOKENS

_FAMILIES = (
    MASKS,
    BIDIRECTIONAL,
    BRANCHES,
    PARTITIONS,
    SOFTMAX,
    TOKENS,
    SCORES,
    SINKS,
    SOFTCAP,
    HEADS,
    READS,
    DECODING,
    ROWS,
)
DEFECTS: Mapping[str, Defect] = MappingProxyType(
    {defect.name: defect for family in _FAMILIES for defect in family}
)

__all__ = ["DEFECTS", "Defect"]
