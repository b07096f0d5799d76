"""The catalogue of defects: each one way for a kernel, or what feeds it, to be wrong.

Used in two directions: forwards it scores a test (:mod:`attnlab.mutation.power`), backwards it diagnoses an output
(:mod:`attnlab.diagnosis.diagnose`). What it leaves out, and why: races, compiler faults and reduced-precision products,
which no transformation of the reference shows.
"""

from attnlab.defects.defect import Defect
from attnlab.defects.heads import HEADS
from attnlab.defects.reads import READS
from attnlab.defects.rows import ROWS
from attnlab.defects.scores import SCORES
from attnlab.defects.sinks import SINKS
from attnlab.defects.softcap import SOFTCAP
from attnlab.defects.tokens import TOKENS

CATALOGUE: tuple[Defect, ...] = (*TOKENS, *SCORES, *SINKS, *SOFTCAP, *HEADS, *READS, *ROWS)

__all__ = ["CATALOGUE", "Defect"]
