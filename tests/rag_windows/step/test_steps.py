"""When steps are recorded, for what, and how many recordings there are."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import rag_windows.step.steps as steps_module
from rag_windows.step.room import Room, bucket
from rag_windows.windows import PackedWindows

from . import models
from .models import OTHER, PREFIX, QUERY, WINDOWS, answer, expected, ids


@pytest.mark.parametrize(
    ("tokens", "size"),
    [
        (1, 64),
        (64, 64),
        (65, 128),
        (129, 256),
        (1000, 1024),
        (1024, 1024),
        (1025, 2048),
        (3000, 3072),
    ],
)
def test_buckets_double_up_to_1024(tokens: int, size: int) -> None:
    assert bucket(tokens) == size


def test_the_first_steps_are_ordinary() -> None:
    lm, tapes = models.recorded_small(eager_steps=3)
    assert ids(lm, 12) == expected(12)
    # Of 11 steps three are ordinary, one is recorded beside, one proves, and the rest are launched.
    assert (tapes.recorded, tapes.played) == (1, 1 + 11 - 5)


def test_nothing_is_recorded_that_would_not_pay() -> None:
    lm, tapes = models.recorded_small(eager_steps=3, pays_from=6)
    assert ids(lm, 6) == expected(6)
    assert ids(lm, 10) == expected(10)
    assert tapes.recorded == 0
    ids(lm, 12)
    assert tapes.recorded == 1


def test_a_tail_that_outgrows_its_room_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "AHEAD", 1)
    lm, tapes = models.recorded_small()
    assert ids(lm, 150) == expected(150)
    assert tapes.recorded == 3
    assert tapes.played > 130


def test_there_is_room_for_what_may_be_generated() -> None:
    lm, tapes = models.recorded_small()
    assert ids(lm, 150) == expected(150)
    assert tapes.recorded == 1


def test_where_too_many_are_lent_the_next_is_ordinary() -> None:
    lm, tapes = models.recorded_small(max_recordings=1)

    def within(token_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if token_ids.shape[1] == len(PREFIX) + len(QUERY) + 6:
            assert tapes.recorded == 1
            assert ids(lm, 12, OTHER) == expected(12, OTHER)
        return torch.zeros(1, dtype=torch.bool)

    assert ids(lm, 12, stopping_criteria=[within]) == expected(12)
    assert tapes.recorded == 1


def test_a_recording_ends_with_its_call() -> None:
    lm, tapes = models.recorded_small(max_recordings=1)
    context = lm.encode_ids(PREFIX, WINDOWS)
    for made in (1, 2, 3):
        assert answer(lm, context, 12) == expected(12)
        assert tapes.recorded == made
        assert not models.steps(lm)._holders


def packed(context: Any) -> PackedWindows:
    assert isinstance(context.windows, PackedWindows)
    return context.windows


def test_nothing_outlives_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for a collection: memory of a device is too dear for that."""
    lm, tapes = models.recorded_small()
    rooms: list[Any] = []

    def noted(*args: Any) -> Room:
        room = Room(*args)
        rooms.append(weakref.ref(room))
        return room

    monkeypatch.setattr(steps_module, "Room", noted)
    gc.disable()
    try:
        context = lm.encode_ids(PREFIX, WINDOWS)
        rooms.append(weakref.ref(packed(context).keys[0]))
        answer(lm, context, 12)
        assert tapes.recorded == 1
        del context
        assert [held() for held in rooms] == [None, None]
    finally:
        gc.enable()
