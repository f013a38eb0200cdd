"""Tokenizers by name, built once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Builder = Callable[[], Any]


@dataclass(frozen=True)
class Fixture:
    """A tokenizer and what its nature allows.

    Attributes:
        tokenizer: the tokenizer.
        lossless: whether decoding gives the text back, character by character.
    """

    tokenizer: Any
    lossless: bool


BUILDERS: dict[str, tuple[Builder, bool]] = {}


def fixture(name: str, *, lossless: bool = True) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        BUILDERS[name] = (builder, lossless)
        return builder

    return register


@functools.cache
def build(name: str) -> Fixture:
    builder, lossless = BUILDERS[name]
    return Fixture(builder(), lossless)
