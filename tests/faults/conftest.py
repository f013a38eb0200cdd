"""What all tests of faults have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rag_windows.cache.disk_cases import System, on


@pytest.fixture(autouse=True)
def nothing_waits_for_the_medium() -> Iterator[None]:
    """Only a power cut could tell."""
    with on(System()):
        yield
