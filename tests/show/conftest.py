"""Draw without a display, and close what a test drew."""

from collections.abc import Iterator

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close all figures after a test."""
    yield
    plt.close("all")
