"""Merge the stores of the shards of a check into one report."""

from collections.abc import Mapping, Sequence

from attnlab.checker.known import KnownFinding
from attnlab.checker.report import Report, build_report
from attnlab.tasks.store import Header
from attnlab.tasks.task import Outcome, Task


def merged_check(
    header: Header, outcomes: Mapping[str, Outcome], known: Sequence[KnownFinding] = ()
) -> Report:
    """Return the report of a check from what :func:`attnlab.tasks.merge.merged_stores` returns.

    It equals that of a check in one piece, except that ``seconds`` is the sum of the cases' times.
    """
    limit_s = header["options"]["case_seconds"]
    return build_report(
        header,
        [Task(**fields, limit_s=limit_s) for fields in header["cases"]],
        outcomes,
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
        stopped="its shard was stopped before",
        known=known,
    )
