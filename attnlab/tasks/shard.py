"""Shard: one of several parts of a list of tasks, for machines that do not talk to each other."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from attnlab.case.fields import refuse
from attnlab.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part ``index`` of ``count``, counted from 1."""

    index: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Return the shard of a text such as "2/3"; raise InvalidCase for another text."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            refuse("shard", "i/n with 1 ≤ i ≤ n, for example 1/3", text)
        return cls(index=int(match[1]), count=int(match[2]))

    def of(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of this shard, in their order.

        The division depends only on the tasks and their costs. Starting with the most expensive, each
        task goes to the shard with the least cost so far, so the shards take about the same time.
        """
        if self.count == 1:
            return [*tasks]
        loads, owner = [0.0] * self.count, dict[str, int]()
        for task in sorted(tasks, key=lambda task: (-task.cost_s, task.key)):
            least = min(range(self.count), key=lambda i: (loads[i], i))
            loads[least] += task.cost_s
            owner[task.key] = least
        return [task for task in tasks if owner[task.key] == self.index - 1]


ALL = Shard()
