"""Where a long text is cut, and how much work it takes."""

from __future__ import annotations

import random

import pytest

from rag_windows.prompt.builder import split


def _words(text: str) -> list[int]:
    """A token for each letter, two around: sizes are easy to see."""
    return [0, *map(ord, text), 0]


def _cut(text: str, limit: int) -> list[str]:
    return [text[a:b] for a, b, _ in split(text, _words, limit, len(_words(text)))]


def test_paragraphs_before_sentences_before_spaces_before_characters() -> None:
    paragraphs = "one two. three\n\n" * 4
    assert _cut(paragraphs, 20) == ["one two. three\n\n"] * 4
    sentences = "One two three. " * 4
    assert _cut(sentences, 20) == ["One two three. "] * 4
    words = "abcde fghij " * 4
    assert _cut(words, 16) == ["abcde fghij "] * 4
    assert _cut("x" * 20, 10) == ["x" * 8, "x" * 8, "x" * 4]
    assert _cut("東京は。" * 4, 11) == ["東京は。東京は。"] * 2


def test_a_cut_leaves_at_least_half_of_what_fits() -> None:
    text = "a.\n\n" + "word " * 40
    assert all(len(part) >= 9 for part in _cut(text, 22)[:-1])


@pytest.mark.parametrize("seed", range(20))
def test_parts_cover_any_text_and_fit(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("ab .!\n\n東é") for _ in range(draw.randint(30, 900)))

    def uneven(part: str) -> list[int]:
        return [0, 0, *(i for c in part for i in [ord(c)] * (5 if c in "東é" else 1))]

    limit = draw.randint(9, 60)
    parts = split(text, uneven, limit, len(uneven(text)))
    assert "".join(text[a:b] for a, b, _ in parts) == text
    for start, end, ids in parts:
        assert ids == uneven(text[start:end])
        assert len(ids) <= limit
        assert end > start


def test_a_boundary_that_would_make_the_part_too_long_is_not_taken() -> None:
    def encode(part: str) -> list[int]:
        return [0] * (len(part) + (6 if part.endswith(" ") else 0))

    text = "word " * 20
    parts = split(text, encode, 10, len(encode(text)))
    assert "".join(text[a:b] for a, b, _ in parts) == text
    assert max(len(ids) for *_, ids in parts) <= 10


def test_work_grows_with_the_text_and_not_with_its_square() -> None:
    work = {}
    for size in (50_000, 400_000):
        text = ("Some words stand here. " * (size // 23 + 1))[:size]
        read = 0

        def encode(part: str) -> list[int]:
            nonlocal read
            read += len(part)
            return [0, 0, *part.encode()]

        split(text, encode, 512, size + 2)
        work[size] = read
    assert work[400_000] < 9 * work[50_000]
    assert work[400_000] < 4 * 400_000
