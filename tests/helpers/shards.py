"""A check in shards, and its report without what differs between two runs."""

import json
from pathlib import Path

from attnlab.checker.plan import Plan
from attnlab.checker.report import Report, check_library, merged_check
from attnlab.tasks.store import Shard, merged_stores
from attnlab.tasks.task import Engine


def without_times(report: Report) -> str:
    """Return a report as JSON without its times."""
    return json.dumps({**report.to_dict(), "seconds": 0})


def sharded(
    plan: Plan, folder: Path, count: int, engine: Engine | None = None
) -> tuple[Report, list[Report]]:
    """Return the merged report of a check in shards, and the report of each."""
    folders = [folder / f"{i}" for i in range(1, count + 1)]
    parts = []
    for i, out in enumerate(folders, 1):
        parts.append(check_library(plan, engine, shard=Shard(index=i, count=count), out=out))
    header, outcomes = merged_stores(folders[::-1])
    return merged_check(header, outcomes), parts
