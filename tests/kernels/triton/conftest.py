"""Fixtures of the tests of the interpreter."""

import pytest

from attnlab.kernels.triton import patches, type_cache


@pytest.fixture
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without records of operations, and drop those of the test, which plants a fault in Triton."""
    monkeypatch.setattr(patches, "_KEPT", {})
    monkeypatch.setattr(type_cache, "records_of", lambda *given: type_cache.Records(given[0]))
