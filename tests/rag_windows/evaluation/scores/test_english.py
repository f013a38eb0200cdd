from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import spacy

from rag_windows import MissingExtraError
from rag_windows.evaluation import metrics
from rag_windows.evaluation.metrics import LONGEST, spaced


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it's 5km, isn't it?", "it 's 5 km , is n't it ?"),
        ("(e.g. at 5 a.m.)", "( e.g. at 5 a.m. )"),
        ("", ""),
        ("...", "..."),
        ("naïve “words”", "naïve “ words ”"),
    ],
)
def test_words_stand_apart(text: str, words: str) -> None:
    assert spaced(text) == words


def test_half_a_surrogate_pair_is_shown_as_such() -> None:
    assert spaced("x \ud83d y") == "x \ufffd y"


def test_a_long_text_is_split_like_a_short_one() -> None:
    text = "don't stop (here). " * (LONGEST // 10)
    once = spaced("don't stop (here).")
    assert spaced(text).split() == once.split() * (LONGEST // 10)


def test_more_than_a_million_characters_are_split() -> None:
    assert len(spaced("well, yes " * 120_000).split()) == 360_000


def test_a_run_of_punctuation_takes_no_quadratic_time() -> None:
    begun = time.monotonic()
    assert spaced(f"it's {'(-' * 500_000} isn't") == f"it 's {'(-' * 500_000} is n't"
    assert time.monotonic() - begun < 5


def test_threads_share_the_rules() -> None:
    texts = [f"it's {i}km; isn't {i}th-rate_{i}?" for i in range(300)]
    nlp = spacy.blank("en")
    expected = [" ".join(token.text for token in nlp(text)) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(spaced, texts)) == expected


def test_the_rules_are_used_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    most: list[int] = []

    def rules(text: str) -> list[Any]:
        inside.append(1)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()
        return []

    monkeypatch.setattr(metrics, "_tokenizers", [rules])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(spaced, "abcd"))
    assert most == [1] * 4


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    monkeypatch.setattr(metrics, "_tokenizers", [])
    with pytest.raises(MissingExtraError, match=r'spacy; run: pip install "\.\[eval\]"'):
        spaced("x")
