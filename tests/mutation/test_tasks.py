"""power as tasks: in shards, and interrupted, it gives the report of power in one piece."""

import json

import pytest
from helpers.commands import SMALL, error_line

from attnlab.cli.main import main


def printed(capsys, argv, code):
    assert main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def without_times(report):
    return {name: value for name, value in report.items() if name != "seconds"}


@pytest.mark.slow
def test_shards_of_power(capsys, tmp_path):
    flags = ["power", *SMALL, "--stage", "cast_after_cumsum"]
    whole = printed(capsys, flags, 1)
    stores = [str(tmp_path / f"{i}") for i in (1, 2)]
    for i, out in enumerate(stores, 1):
        part = printed(capsys, [*flags, "--shard", f"{i}/2", "--out", out], 0)
        assert part["shard"] == f"{i}/2"
        assert part["tasks"] > 5
    assert without_times(printed(capsys, ["merge", *stores], 1)) == without_times(whole)
    again = printed(capsys, [*flags, "--shard", "1/2", "--out", stores[0]], 0)
    assert again["failed"] == {}
    assert "known must not be given" in error_line(capsys, ["merge", *stores, "--known", "x"])


def test_a_shard_needs_a_store(capsys):
    flags = ["power", *SMALL, "--shard"]
    assert "out must be given with shard" in error_line(capsys, [*flags, "1/2"])
    assert "shard must be" in error_line(capsys, [*flags, "0/3"])


def test_an_unknown_engine(capsys):
    assert "engine must be" in error_line(capsys, ["power", *SMALL, "--engine", "locals"])
