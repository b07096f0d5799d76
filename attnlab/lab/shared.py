"""Products that the runs of a Lab share: the last few of each kind, by key."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class SharedProducts:
    """A store of products by kind and key; it keeps the ``keep`` last used of each kind.

    Threads may share it: a product is made while a lock is held.
    """

    keep: int
    _stores: dict[str, "OrderedDict[Hashable, Any]"] = field(default_factory=dict, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def has(self, kind: str, key: Hashable) -> bool:
        """Return whether the product is there."""
        return key in self._stores.get(kind, {})

    def count(self, kind: str) -> int:
        """Return how many products of a kind are there."""
        return len(self._stores.get(kind, {}))

    def get(self, kind: str, key: Hashable, make: Callable[[], T]) -> tuple[T, bool]:
        """Return the product of a key, made if it is missing, and whether it was there."""
        with self._lock:
            store = self._stores.setdefault(kind, OrderedDict())
            if key in store:
                store.move_to_end(key)
                return store[key], True
            while len(store) >= self.keep:
                store.popitem(last=False)
            store[key] = make()
            return store[key], False
