"""Where among the passages the fact stands."""

from __future__ import annotations


def places(route: int, count: int) -> list[int]:
    """Places for one of several routes: both ends, and every fourth of ``count``.

    Four routes in turn see every place; each of them at every place would say the same again.
    """
    return [place for place in range(count) if place in (0, count - 1) or place % 4 == route % 4]
