"""Products that the runs of a Lab share: the last few of each kind, by key."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from attnlab.lab.product_files import from_file, product_file, shared_folder

T = TypeVar("T")


@dataclass(slots=True)
class SharedProducts:
    """A store of products by kind and key; it keeps the ``keep`` last used of each kind.

    Threads may share it: one thread makes a product, and others that need the same one wait for it.
    ``folder``: where processes share products as files, None for no files.
    """

    keep: int
    folder: Path | None = field(default_factory=shared_folder)
    _stores: dict[str, "OrderedDict[Hashable, Any]"] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _making: dict[Hashable, threading.RLock] = field(default_factory=dict, repr=False)

    def has(self, kind: str, key: Hashable) -> bool:
        """Return whether the product is there, in this process or in a file."""
        if key in self._stores.get(kind, {}):
            return True
        return self.folder is not None and product_file(self.folder, kind, key).is_file()

    def count(self, kind: str) -> int:
        """Return how many products of a kind this process keeps."""
        return len(self._stores.get(kind, {}))

    def get(
        self, kind: str, key: Hashable, make: Callable[[], T], *, in_file: bool = False
    ) -> tuple[T, bool]:
        """Return the product of a key, made if it is missing, and whether it was there.

        ``in_file``: processes may share this product.
        """
        with self._lock:
            store = self._stores.setdefault(kind, OrderedDict())
            if key in store:
                store.move_to_end(key)
                return store[key], True
            making = self._making.setdefault((kind, key), threading.RLock())
        with making:  # products are made from others, never in a circle, so no thread waits forever
            with self._lock:
                if key in store:
                    return store[key], True
                while len(store) >= self.keep:
                    store.popitem(last=False)
            try:
                if in_file and self.folder is not None:
                    product, was_there = from_file(product_file(self.folder, kind, key), make)
                else:
                    product, was_there = make(), False
                with self._lock:
                    store[key] = product
            finally:
                with self._lock:
                    self._making.pop((kind, key), None)
            return product, was_there
