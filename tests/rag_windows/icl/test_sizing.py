from __future__ import annotations

from typing import Any

import pytest

from rag_windows import InputError, LimitError
from rag_windows.icl.packing import UNLIMITED_ROOM, Sizes, fill


def size_of(text: str) -> int:
    return len(text) + 2


def test_room_is_the_models_in_eighths_so_that_like_texts_share_windows() -> None:
    sizes = Sizes()
    assert sizes.room(1000, 1024) == sizes.room(900, 1024) == 896
    assert sizes.room(100, 1024) == 100
    assert sizes.room(None, None) == UNLIMITED_ROOM
    assert Sizes(window_tokens=300).room(1000, 1024) == 300
    assert Sizes(window_tokens=300).room(None, None) == 300


def test_more_room_than_the_model_has_is_refused() -> None:
    with pytest.raises(LimitError, match="window_tokens=950 is more than the 900 tokens"):
        Sizes(window_tokens=950).room(900, 1024)


@pytest.mark.parametrize(
    "given",
    [
        {"windows": 2, "window_tokens": 30},
        {"windows": 2.0},
        {"windows": True},
        {"window_tokens": 0},
        {"window_tokens": "9"},
    ],
)
def test_sizes_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sizes(**given)


def test_windows_hold_whole_demonstrations_in_order() -> None:
    shown = [f"line {number}" for number in range(100)]
    texts = fill(shown, "\n", size_of, 60)
    assert "\n".join(texts).split("\n") == shown
    assert max(map(size_of, texts)) <= 60
    assert len(fill(shown, "\n", size_of, 60, windows=40)) == 40


def test_a_demonstration_that_fits_no_window_is_named() -> None:
    with pytest.raises(LimitError, match=r"Demonstration 1 \('yyyy.* 52 tokens.* holds 40"):
        fill(["x", "y" * 50, "z"], "\n", size_of, 40)


def test_one_that_fits_by_a_hair_is_taken() -> None:
    assert fill(["x" * 38, "y" * 38], "\n", size_of, 40) == ["x" * 38, "y" * 38]


def test_texts_that_make_more_tokens_together_are_packed_more_loosely() -> None:
    def denser(text: str) -> int:
        return size_of(text) + 3 * text.count("\n")

    texts = fill(["abcd"] * 30, "\n", denser, 40)
    assert max(map(denser, texts)) <= 40
    assert "\n".join(texts).split("\n") == ["abcd"] * 30
