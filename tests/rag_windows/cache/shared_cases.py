"""Stores that machines share, and one whose calls fail, wait or lie where a test says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rag_windows import PassageCache
from rag_windows.cache.shared import SharedTier
from tests.rag_windows.cache.disk_cases import entry_of

_numbers = itertools.count()

Act = Callable[..., Any]
"""Called with a call's name, the call itself and its arguments, instead of the call."""


def fresh() -> str:
    """An empty store in memory, which lasts as long as the process."""
    return f"memory://store{next(_numbers)}/passages"


def labels(*names: str) -> list[str]:
    return [*PassageCache().digests(names)]


def labelled(number: int, tokens: int = 5) -> Any:
    """An entry that depends on its number only, with labels as the engine makes them."""
    made = entry_of(number, tokens)
    return dataclasses.replace(made, labels=(*labels("document", f"passage-{number}"),))


def filled(url: str, numbers: Sequence[int]) -> SharedTier:
    from tests.rag_windows.cache.disk_cases import key_of

    made = SharedTier(url)
    for number in numbers:
        assert made.put(key_of(number), labelled(number))
    return made


class Between:
    """A file system of which each call goes through a test's function."""

    def __init__(self, plain: Any, act: Act) -> None:
        self.plain, self.act = plain, act

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self.plain, name)
        if not callable(plain) or name == "invalidate_cache":  # which asks nobody
            return plain

        def call(*given: Any, **options: Any) -> Any:
            return self.act(name, plain, *given, **options)

        return call


def between(tier: SharedTier | PassageCache | None, act: Act) -> None:
    """Put a function between a tier and its store."""
    shared = tier.shared if isinstance(tier, PassageCache) else tier
    assert shared is not None
    plain = shared.remote.system
    shared.remote.system = Between(plain.plain if isinstance(plain, Between) else plain, act)


def calls(told: list[str]) -> Act:
    """Note the name of each call."""

    def act(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        told.append(name)
        return plain(*given, **options)

    return act


def failing(error: BaseException, *names: str) -> Act:
    """Calls, all or these, raise."""

    def act(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        if not names or name in names:
            raise error
        return plain(*given, **options)

    return act
