"""The words that a text is found by."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import regex

# Words that carry a question's grammar rather than its subject.
FUNCTION_WORDS = frozenset(
    "a an and are as at be been but by can could did do does for from had has have how i if in "
    "into is it its many me much my no not of on or please s she he her his him shall should so "
    "such tell that the their them then there these they this those to us was we were what when "
    "where which who whom whose why will with would you your".split()
)

# Scripts without spaces: in those of the first kind a character has a meaning of its own.
_IDEOGRAPHS = r"\p{Han}\p{Hiragana}\p{Katakana}ー"
_SPACELESS = rf"[{_IDEOGRAPHS}\p{{Line_Break=Complex_Context}}]"
_IDEOGRAPH = regex.compile(rf"[{_IDEOGRAPHS}]")
_CHARACTER = regex.compile(r"\X")
# re's \w has no combining marks, unlike regex's, and is quicker.
_PLAIN = re.compile(r"\w+")
_WORD = regex.compile(rf"({_SPACELESS}+)|[\w--{_SPACELESS}]+", regex.V1)
_NOT_PLAIN = regex.compile(rf"\p{{M}}|\u0640|{_SPACELESS}")


def _version() -> str:
    with suppress(PackageNotFoundError):
        return f"1, icu4py {version('icu4py')}"
    return "1, without ICU"


VERSION = _version()
"""Of how texts are split into words."""

_INVISIBLE = regex.compile(r"\p{Default_Ignorable_Code_Point}+")
# Vowel points, marks of stress and the stroke that stretches Arabic words: writers leave them out.
# Other scripts' marks are letters, and what NFKC composes with a letter (é, й, أ) is another one.
_OPTIONAL = regex.compile(
    r"(?<=[\p{Latin}\p{Greek}\p{Cyrillic}\p{Hebrew}\p{Arabic}\p{Syriac}])\p{Mn}+|\u0640"
)
# The vowel am of Thai and Lao, which NFKC takes to pieces that no dictionary knows.
_AM = (("\u0e4d\u0e32", "\u0e33"), ("\u0ecd\u0eb2", "\u0eb3"))

_SOFT_LINE_END = regex.compile(r"\u00ad[^\S\n]*\n\s*")
_LINE_END = regex.compile(r"-(?<=(\p{L}+).)[^\S\n]*\n\s*(\p{L}+)")
# The look-behind stands behind the first letter, so that the search for it is quick.
_CAPITALS = regex.compile(r"[A-Z](?<![\w.].)(?:[A-Z]+|\.(?:[A-Z]\.)*[A-Z])?(?!\w)")
_WORD_BEFORE = regex.compile(r"(?<=(\w+)[ \u00a0-])")


def tokenize(text: str) -> list[str]:
    """Split a text into the words that it is found by, in no promised order.

    Words are compatibility-normalised, case-folded and without invisible characters
    (NFKC_Casefold), and not stemmed. Optional marks are left out: vowel points of Arabic, Hebrew
    and Syriac, marks of stress. What can be asked for in several ways counts in each of them:

    - Scripts without spaces are split by ICU's dictionaries, where ICU is installed. The characters
      of a Chinese or Japanese word count, too, and the pairs of characters of a Thai, Lao, Khmer or
      Burmese one, so that parts of compounds and names that no dictionary has are found.
    - A word divided by a hyphen at a line's end counts whole and in its parts.
    - An abbreviation counts with and without its dots (U.S.), and an English function word in
      capitals also as a word in capitals, which is none of `FUNCTION_WORDS`: US, IT, WHO, and
      single letters behind another word, as in "vitamin A".

    Other versions of this package and of ICU may split otherwise: who stores words must store
    `VERSION` with them.
    """
    text = _SOFT_LINE_END.sub("", text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).replace("\u2010", "-")
    folded = text.casefold()
    if folded.isascii():
        words: list[str] = _PLAIN.findall(folded)
    else:
        folded = unicodedata.normalize("NFKC", folded)
        # A text has many letters and few different ones.
        plain = not _NOT_PLAIN.search("".join(set(folded)))
        words = _PLAIN.findall(folded) if plain else _words(folded)
    whole = ["".join(match.groups()).casefold() for match in _LINE_END.finditer(text)]
    return words + whole + _names(text)


def _words(folded: str) -> list[str]:
    """Words of a text with combining marks, or of scripts without spaces."""
    folded = _OPTIONAL.sub("", folded)
    for pieces, vowel in _AM:
        folded = folded.replace(pieces, vowel)
    words: list[str] = []
    runs: list[str] = []
    for match in _WORD.finditer(folded):
        (words if match[1] is None else runs).append(match[0])
    if not runs:
        return words
    for word in _divided(runs):
        words.append(word)
        characters = _CHARACTER.findall(word)
        if len(characters) > 1 and _IDEOGRAPH.match(word):
            words += characters
        elif len(characters) > 2:
            words += map("".join, itertools.pairwise(characters))
    return words


def _divided(runs: Sequence[str]) -> Iterator[str]:
    """Words of runs of scripts without spaces; the runs themselves where there is no ICU."""
    try:
        from icu4py.breakers import WordBreaker  # on first use: it loads 40 MB
    except ImportError:  # there is no wheel for this platform
        yield from runs
        return
    # One breaker for all runs: making one takes as long as splitting a page.
    yield from (word for word in WordBreaker("\n".join(runs), "en") if word != "\n")


def _names(text: str) -> list[str]:
    """Abbreviations without their dots, and function words that are names by their capitals."""
    names = []
    for match in _CAPITALS.finditer(text):
        word = match[0].replace(".", "")
        folded = word.casefold()
        if word != match[0]:
            names.append(folded)
        if folded in FUNCTION_WORDS:
            before = len(word) > 1 or _WORD_BEFORE.match(text, match.start())
            if before is True or (before and before[1].casefold() not in FUNCTION_WORDS):
                names.append(word)
    return names
