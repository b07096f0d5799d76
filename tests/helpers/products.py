"""Products that the processes of one run of pytest share, such as the recording of vLLM's engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnlab.lab.products import FOLDER_VARIABLE


@contextmanager
def sharing_products(run_folder: Path) -> Iterator[None]:
    """Let the processes that start inside the block, and this one, share products.

    vLLM's engine then runs once for each input. It takes about 20 s, most of them for its imports.
    """
    folder = run_folder / "products"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield
