"""Where a long text is cut, and how much work it takes."""

from __future__ import annotations

import random

import pytest

from rag_windows.prompt.builder import TooLittleRoomError, split


def _words(text: str) -> list[int]:
    """A token for each letter, two around: sizes are easy to see."""
    return [0, *map(ord, text), 0]


def _cut(text: str, limit: int) -> list[str]:
    return [text[p.start : p.end] for p in split(text, _words, limit, len(_words(text)))]


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
    assert "".join(text[p.start : p.end] for p in parts) == text
    for part in parts:
        assert part.ids == tuple(uneven(text[part.start : part.end]))
        assert len(part.ids) <= limit
        assert part.end > part.start


def test_a_boundary_that_would_make_the_part_too_long_is_not_taken() -> None:
    def encode(part: str) -> list[int]:
        return [0] * (len(part) + (6 if part.endswith(" ") else 0))

    text = "word " * 20
    parts = split(text, encode, 10, len(encode(text)))
    assert "".join(text[p.start : p.end] for p in parts) == text
    assert max(len(p.ids) for p in parts) <= 10


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


def test_too_little_room_is_said_with_the_size() -> None:
    with pytest.raises(TooLittleRoomError) as caught:
        split("text", lambda part: [0] * (10 + len(part)), 10, 14)
    assert caught.value.size == 10
    with pytest.raises(TooLittleRoomError) as caught:
        split("text" * 99, lambda part: [0] * (60 + len(part)), 64, 456)
    assert caught.value.size == 60
    with pytest.raises(TooLittleRoomError) as caught:
        split("東", lambda part: [0] * (1 + 4 * len(part)), 4, 5)
    assert caught.value.size == 5
