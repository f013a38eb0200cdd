"""Needles that are invented and put into texts of a folder, for models that know real texts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rag_windows.errors import InputError
from rag_windows.evaluation.long.needle import Needle, Needles, digest, others
from rag_windows.passage import Passage

PREFIX = "Answer the question from the passages. Give the number alone, without other words."

_STARTS = (
    "Bel Cor Dra Fen Gal Hes Jor Kel Lum Mar Nor Pol Quin Ros Sel Tam Ul Var Wen Yor Zim"
).split()
_ENDS = (
    "ador bin cott dane ewick fara gorn hold ina jeth kris lund mira nix oway pry rell sen tova"
).split()

_TRIES = 1000
_SENTENCE_END = re.compile(r"[.!?]\s+")


def invented_needles(
    pool: Sequence[Passage], source: str, count: int, most: int, seed: int
) -> Needles:
    """A sentence such as "The secret number of Kelnix Tambin is 48213." in a passage of the pool.

    It stands between two sentences near the middle of its passage. Neither its name nor its number
    occurs in the pool.

    Args:
        pool: passages to hide it in and among.
        source: name of the pool.
        count: of needles.
        most: passages of a haystack at most.
        seed: of the draw.

    Raises:
        InputError: the pool is empty, or holds every number there is.
    """
    if not pool:
        raise InputError(f"{source} holds no passages to hide anything in.")
    rng = random.Random(seed)
    known = {word for one in pool for word in re.findall(r"\w+", one.text)}
    made = []
    for number in range(1, count + 1):
        first, second, code = _fresh(rng, known)
        around = pool[rng.randrange(len(pool))]
        sentence = f"The secret number of {first} {second} is {code}."
        text = _inserted(around.text, sentence)

        def other(passage: Passage, text: str = around.text) -> bool:
            return passage.text != text

        made.append(
            Needle(
                str(number),
                f"What is the secret number of {first} {second}?",
                (code,),
                replace(around, text=text, id=f"needle {number}"),
                others(pool, most, f"{seed}/{number}", other),
            )
        )
    stamp: dict[str, object] = {"texts": source, "passages": len(pool), "sha256": digest(pool)}
    return Needles(source, tuple(made), stamp, PREFIX)


def folder_passages(folder: Path, words: int) -> tuple[Passage, ...]:
    """The texts of a folder in passages of about so many words.

    Raises:
        DocumentError: there is nothing to read.
        InputError: fewer than one word.
    """
    from rag_windows_retrievers import load_documents, split_documents

    if words < 1:
        raise InputError(f"A passage has at least 1 word, not {words}.")
    loaded = load_documents([folder], root=folder)
    return tuple(split_documents(loaded.documents, words=words))


def _fresh(rng: random.Random, known: set[str]) -> tuple[str, str, str]:
    """Two names and a number that are not known; then they are."""
    for _ in range(_TRIES):
        drawn = (_name(rng), _name(rng), str(rng.randrange(10_000, 100_000)))
        if len({*drawn} - known) == len(drawn):
            known.update(drawn)
            return drawn
    raise InputError("No name or number is left to invent; ask fewer questions.")


def _name(rng: random.Random) -> str:
    return rng.choice(_STARTS) + rng.choice(_ENDS)


def _inserted(text: str, sentence: str) -> str:
    """The sentence behind the end of a sentence near the middle of the text, or behind the text."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    if not ends:
        return f"{text.rstrip()} {sentence}"
    at = min(ends, key=lambda end: abs(end - len(text) / 2))
    return f"{text[:at]}{sentence} {text[at:]}"
