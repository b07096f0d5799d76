"""The store: resumed after any end, and never harmed by bad input."""

import json
import os
import resource
import subprocess
import sys

import pytest

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.machine import available_bytes
from attnlab.tasks.store import Shard, Store, merged_stores, read_store
from attnlab.tasks.task import Outcome, Task

HEADER = {"command": "check", "options": {"seed": 0, "cases": 31}, "shard": "1/1"}


def outcome(key, status="done"):
    return Outcome(key=key, status=status, verdict={"n": 1} if status == "done" else None)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.fixture
def store(tmp_path):
    """Return the folder of a store with two outcomes."""
    with Store(tmp_path / "s", HEADER) as opened:
        opened.append(outcome("a"))
        opened.append(outcome("b", "not_run"))
    return tmp_path / "s"


def test_outcomes_are_kept_and_what_was_not_started_runs_again(store):
    assert set(read_store(store)[1]) == {"a", "b"}
    with Store(store, HEADER) as opened:
        assert opened.outcomes == {"a": outcome("a")}
        opened.append(outcome("b"))
    assert read_store(store)[1]["b"].status == "done"


def test_a_line_that_was_cut_off_is_dropped(store):
    with (store / "outcomes.jsonl").open("a") as file:
        file.write('{"key": "c", "sta')
    assert set(read_store(store)[1]) == {"a", "b"}
    with Store(store, HEADER) as opened:
        opened.append(outcome("d"))
    assert set(read_store(store)[1]) == {"a", "b", "d"}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({**HEADER, "options": {"seed": 1, "cases": 31}}, "seed is 0, not 1"),
        ({**HEADER, "versions": {"torch": "3"}}, "versions is None"),
        ({**HEADER, "shard": "1/2"}, "shard is 1/1, not 1/2"),
    ],
)
def test_another_command_leaves_the_store_unharmed(store, header, words):
    before = contents(store)
    with pytest.raises(InvalidCase, match=words):
        Store(store, header)
    assert contents(store) == before


def test_a_folder_that_is_no_store(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(InvalidCase, match=r"thesis\.txt"):
        Store(tmp_path, HEADER)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(InvalidCase, match="folder"):
        Store(tmp_path / "thesis.txt", HEADER)
    with pytest.raises(InvalidCase, match="must be a store"):
        read_store(tmp_path)


@pytest.mark.parametrize("line", ["nonsense", '{"key": 1}', '{"key": "a", "status": "other"}'])
def test_a_corrupt_line_is_named(store, line):
    text = (store / "outcomes.jsonl").read_text()
    (store / "outcomes.jsonl").write_text(f"{line}\n{text}")
    before = contents(store)
    with pytest.raises(InvalidCase, match="line 1, is not an outcome"):
        Store(store, HEADER)
    assert contents(store) == before


def test_another_format(store):
    header = json.loads((store / "header.json").read_text())
    (store / "header.json").write_text(json.dumps({**header, "format": 99}))
    with pytest.raises(InvalidCase, match="format 1, got format 99"):
        Store(store, HEADER)


def test_two_processes_do_not_write_at_once(store):
    with Store(store, HEADER), pytest.raises(InvalidCase, match="in use by another process"):
        Store(store, HEADER)
    Store(store, HEADER).close()


FULL = """
import resource, sys
from pathlib import Path
from attnlab.case.errors import Unavailable
from attnlab.tasks.store import Store
from attnlab.tasks.task import Outcome
sys.path.insert(0, sys.argv[2])
from tasks.test_store import HEADER
with Store(Path(sys.argv[1]), HEADER) as store:
    for i in range(1000):
        try:
            store.append(Outcome(key=str(i), status="done", verdict={"text": 100 * "x"}))
        except Unavailable as error:
            print(i, error)
            break
"""


def test_a_full_disk_costs_only_the_last_outcome(tmp_path):
    """A limit of the file size stands for a full disk: a part of the line is written."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # noqa: E731
    done = subprocess.run(
        [
            sys.executable,
            "-B",  # else a truncated .pyc stays in the package
            "-c",
            FULL,
            str(tmp_path / "s"),
            os.path.dirname(os.path.dirname(__file__)),
        ],
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    count, text = done.stdout.split(" ", 1)
    assert "cannot be written" in text, done.stderr
    assert int(count) > 2
    assert (tmp_path / "s" / "outcomes.jsonl").read_bytes().endswith(b"\n")
    assert len(read_store(tmp_path / "s")[1]) == int(count)


def test_full_disk_of_the_first_kind_is_unavailable(store):
    with Store(store, HEADER) as opened:
        os.close(opened._file)
        opened._file = os.open("/dev/full", os.O_WRONLY)
        with pytest.raises(Unavailable, match="No space left"):
            opened.append(outcome("z"))


def shards(folder, *names, **changes):
    """Make a store for each shard name and return their folders."""
    found = []
    for i, name in enumerate(names):
        path = folder / f"{i}"
        with Store(path, {**HEADER, **changes, "shard": name}) as opened:
            opened.append(outcome(f"task of {name}"))
        found.append(path)
    return found


def test_shards_are_merged(tmp_path):
    header, outcomes = merged_stores(shards(tmp_path, "2/3", "1/3", "3/3"))
    assert (header["shard"], len(outcomes)) == ("1/1", 3)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("1/3", "3/3"), "missing 2/3"),
        (("1/3",), "missing 2/3, 3/3"),
        (("1/2", "1/2"), "given once"),
        (("1/2", "2/3"), "one division"),
    ],
)
def test_shards_that_do_not_fit(tmp_path, names, words):
    with pytest.raises(InvalidCase, match=words):
        merged_stores(shards(tmp_path, *names))


def test_stores_of_different_sources(tmp_path):
    (tmp_path / "x").mkdir()
    one = shards(tmp_path, "1/2")
    two = shards(tmp_path / "x", "2/2", options={"seed": 7, "cases": 31})
    with pytest.raises(InvalidCase, match="seed is 7, not 0"):
        merged_stores([*one, *two])
    with pytest.raises(InvalidCase, match="given once"):
        merged_stores([*one, *one])


# Shards: a deterministic, balanced division; and the memory that a machine reports.


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
