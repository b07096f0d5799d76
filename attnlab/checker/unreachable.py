"""Parts of vLLM's ops that no hostile case reaches, each with its reason.

The list is checked: a part that a case does reach is reported as such, so that the entry is removed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """A block, or a statement, that no hostile case reaches.

    - ``function``: its function. ``text``: its condition, as ``ast.unparse`` writes it, or the first line of
      a statement.
    - ``outcome``: True or False is the outcome of the condition, with the block that then runs; None is a
      statement alone.
    """

    function: str
    text: str
    outcome: bool | None
    reason: str


UNREACHABLE: tuple[Unreachable, ...] = ()
