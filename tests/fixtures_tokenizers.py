"""Small tokenizers of every kind that transformers knows, trained at run time without a network.

Each has the features of a family in real life that matter where text meets control tokens.
``build`` makes one by name; results are kept for the run.
"""

from __future__ import annotations

from tests.small_tokenizers import byte_pairs, in_python, sentence_pieces, words
from tests.small_tokenizers.corpus import ALPHABET, SENTENCES
from tests.small_tokenizers.registry import BUILDERS, Fixture, build

__all__ = ["ALPHABET", "NAMES", "SENTENCES", "Fixture", "build", "kinds"]

kinds = (byte_pairs, sentence_pieces, words, in_python)
"""Importing these fills the registry."""

NAMES = tuple(BUILDERS)
