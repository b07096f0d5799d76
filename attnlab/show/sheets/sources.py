"""Sheet of the changes that the lab makes to vLLM's source before it builds it."""

from pathlib import Path

from attnlab.show.sheets.sheet import Grid, Row, Sheet


def adaptations(root: Path) -> Sheet:
    """Return what is changed in the csrc/rocm attention of the vLLM at ``root``, and why.

    Raises Unavailable if the vLLM has no such source.
    """
    from attnlab.kernels.rocm.adapt import times_adapted

    rows: list[Row] = [[change.what, times, change.why] for change, times in times_adapted(root)]
    count = f"{len(rows)} kinds of changes to csrc/rocm"
    return Sheet(
        kind="Adaptations",
        line=f"<Adaptations: {count}>",
        head=count,
        parts=[Grid(["change", "times", "reason"], rows, most=len(rows))],
    )
