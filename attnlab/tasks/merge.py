"""Merge the stores of shards."""

from collections.abc import Sequence
from pathlib import Path

from attnlab.case.errors import InvalidCase
from attnlab.tasks.shard import Shard
from attnlab.tasks.store import Header, difference_of, read_store
from attnlab.tasks.task import Outcome


def merged_stores(folders: Sequence[Path]) -> tuple[Header, dict[str, Outcome]]:
    """Return the header that all stores share, with shard "1/1", and the outcomes of all.

    Raises InvalidCase, naming the folder or the shard, if a folder is no store, if two stores are of
    different commands, sources, versions or cases, and for a shard that is given twice or missing.
    """
    stores = {folder: read_store(folder) for folder in folders}
    if len(stores) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise InvalidCase(f"{twice} must be given once", field="dir")
    first, (header, _) = next(iter(stores.items()))
    outcomes: dict[str, Outcome] = {}
    owners: dict[str, Path] = {}
    for folder, (other, found) in stores.items():
        difference = difference_of({**other, "shard": None}, {**header, "shard": None})
        if difference:
            text = f"{folder} must be a shard of the same check as {first}: its {difference}"
            raise InvalidCase(text, field="dir")
        if other["shard"] in owners:
            text = (
                f"shard {other['shard']} must be given once: {owners[other['shard']]} and {folder}"
            )
            raise InvalidCase(text, field="dir")
        owners[other["shard"]] = folder
        outcomes |= found
    _check_complete(list(owners))
    return {**header, "shard": "1/1"}, outcomes


def _check_complete(given: Sequence[str]) -> None:
    """Raise InvalidCase if shards are missing or belong to different divisions."""
    shards = [Shard.parse(text) for text in given]
    counts = {shard.count for shard in shards}
    if len(counts) > 1:
        text = f"the shards must be parts of one division, got {', '.join(given)}"
        raise InvalidCase(text, field="dir")
    count = counts.pop()
    missing = sorted(set(range(1, count + 1)) - {shard.index for shard in shards})
    if missing:
        names = ", ".join(f"{index}/{count}" for index in missing)
        raise InvalidCase(f"every shard must be given, missing {names}", field="dir")
