"""Shards: a deterministic, balanced division; and the memory that a machine reports."""

import pytest

from attnlab.case.errors import InvalidCase
from attnlab.tasks.local import available_bytes
from attnlab.tasks.store import Shard
from attnlab.tasks.task import Task

TASKS = [Task(key=f"{i}", payload={}, cost_s=cost) for i, cost in enumerate([9, 1, 1, 5, 4, 2, 8])]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_every_task_is_in_one_shard(count):
    parts = [Shard(index=i, count=count).of(TASKS) for i in range(1, count + 1)]
    assert sorted(task.key for part in parts for task in part) == [task.key for task in TASKS]
    for part in parts:
        assert part == sorted(part, key=lambda task: int(task.key))  # the order is kept


def test_shards_take_about_the_same_time():
    costs = [sum(t.cost_s for t in Shard(index=i, count=3).of(TASKS)) for i in (1, 2, 3)]
    assert costs == [10, 10, 10]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "1", "a/b", "-1/3", "1/3/5", ""])
def test_wrong_shards(text):
    with pytest.raises(InvalidCase, match="shard must be i/n"):
        Shard.parse(text)
    assert Shard.parse("2/3") == Shard(index=2, count=3)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_available_memory_is_the_least_limit(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal: 99 kB\nMemAvailable:   8000 kB\n")
    assert available_bytes(proc, groups) == 8000 * 1024
    write(proc / "self", cgroup="0::/user/job\n")
    write(groups, memory__max="max\n", memory__current="5\n")
    write(groups / "user", memory__max="5000000", memory__current="2000000")
    assert available_bytes(proc, groups) == 3000000
    write(groups / "user", memory__stat="anon 7\ninactive_file 500000\n")
    assert available_bytes(proc, groups) == 3500000
    write(groups / "user" / "job", memory__max="100", memory__current="300")
    assert available_bytes(proc, groups) == 0


def test_available_memory_in_control_groups_of_version_1(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemAvailable:   8000 kB\n")
    write(proc / "self", cgroup="3:cpu:/x\n2:memory:/docker/1\n")
    where = groups / "memory" / "docker" / "1"
    write(where, memory__limit_in_bytes="4000000", memory__usage_in_bytes="1000000")
    write(groups / "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="1")
    assert available_bytes(proc, groups) == 3000000
