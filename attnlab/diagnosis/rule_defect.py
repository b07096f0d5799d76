"""A rule beyond the catalogue as a Defect, so that the diagnosis can try it like one."""

from attnlab.defects.defect import Compute, Defect, always


def rule_defect(family: str, name: str, text: str, compute: Compute) -> Defect:
    """Return the Defect of a rule, which may change every row of every call."""
    return Defect(
        name=name,
        family=family,
        text=text,
        seen_in=(),
        touches="all",
        compute=compute,
        applies=always,
    )
