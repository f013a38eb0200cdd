"""Prompts that both engines answer, as token ids; needs neither engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

MODELS = ("llama", "llama3-rope", "qwen2", "qwen3", "tiny-reader")
NEW_TOKENS = 8
LOWEST, HIGHEST = 10, 500
"""Ids of the tokens in prompts: ordinary ones in every vocabulary here."""


@dataclass(frozen=True)
class Case:
    """One question: token ids, and the temperature inside the windows."""

    name: str
    prefix: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]
    temperature: float = 1.0

    @property
    def ids(self) -> tuple[int, ...]:
        """All of it in a row."""
        return (*self.prefix, *(token for ids in self.windows for token in ids), *self.query)


def drawn(seed: int, count: int) -> tuple[int, ...]:
    """Token ids, always the same for a seed."""
    draw = random.Random(seed)
    return tuple(draw.randrange(LOWEST, HIGHEST) for _ in range(count))


def case(name: str, prefix: int, windows: list[int], query: int, temperature: float = 1.0) -> Case:
    """A case of these lengths; windows of one length and number are the same in every case."""
    made = tuple(drawn(1000 * number + length, length) for number, length in enumerate(windows))
    return Case(name, drawn(7 + prefix, prefix), made, drawn(99, query), temperature)


CASES = (
    case("pcw", 11, [40, 25, 33], 9),
    case("temperature", 11, [40, 25, 33], 9, 0.9),
    case("blocks", 20, [130, 64, 128, 7], 5, 0.9),
    case("no prefix", 0, [50, 31], 6),
    case("one window", 11, [40], 1, 0.9),
    case("one token each", 1, [1, 1, 1], 1),
)
