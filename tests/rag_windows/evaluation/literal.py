"""The scripts' arithmetic once more, word for word and slow, for comparison."""

from __future__ import annotations

import re
from collections.abc import Sequence

import spacy

PUNCTUATION = "!\"#$%&()*+,-./:;<=>?@[]\\^`{|}~_'"


def inscit_words(text: str, nlp: spacy.language.Language) -> list[str]:
    kept = ""
    for letter in " ".join(token.text for token in nlp(text)).lower():
        if letter not in PUNCTUATION:
            kept += letter
    return _without_articles(kept)


def chatrag_words(text: str) -> list[str]:
    for letter in PUNCTUATION:
        text = text.replace(letter, " ")
    return _without_articles(text.lower())


def _without_articles(text: str) -> list[str]:
    # What isn't a letter, digit or underscore bounds a word, so an article may stand in quotes.
    pieces = re.split(r"(\W+)", text)
    return "".join(" " if piece in ("a", "an", "the") else piece for piece in pieces).split()


def f1(predicted: list[str], right: list[str], both_empty: float) -> float:
    if not predicted or not right:
        return both_empty if predicted == right else 0.0
    left = list(right)
    common = 0
    for word in predicted:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(right)
    return 2 * precision * recall / (precision + recall)


def evidence_f1(predicted: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    best = 0.0
    for right in references:
        for _ in predicted:
            hits = len([name for name in set(predicted) if name in right])
            wrong = len(set(predicted)) - hits
            missed = len(set(right)) - hits
            best = max(best, hits / (hits + (wrong + missed) / 2))
    return best
