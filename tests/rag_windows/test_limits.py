from __future__ import annotations

from collections.abc import Iterator

import pytest

from rag_windows import LimitError, Passage, WindowedLM
from tests.rag_windows import small

LONG = "A sentence of some words. " * 30


@pytest.fixture
def no_work() -> Iterator[None]:
    """Nothing is encoded before a limit is checked."""
    with small.passes() as made:
        yield
    assert not made


def test_a_long_passage_becomes_windows_that_cover_it() -> None:
    lm = small.wrapped(max_window_tokens=200)
    out = lm.generate("What?", ["Short.", Passage(LONG, title="Long", id="p7")], max_new_tokens=4)
    windows = [one for one in out.windows if one.passage == 1]
    assert len(windows) > 3
    assert "".join(LONG[one.start : one.end] for one in windows) == LONG
    assert [(note.kind, note.passage) for note in out.notes] == [("split", 1)]
    assert out.citations is not None
    assert [c.id for c in out.citations] == [None, "p7"]
    assert out.citations[1].mass > out.citations[0].mass


def test_by_default_half_of_the_positions_are_a_window() -> None:
    assert small.lm().max_window_tokens == small.POSITIONS // 2


def test_a_window_beyond_the_positions_is_refused_by_name(request: pytest.FixtureRequest) -> None:
    wide = WindowedLM(small.model(), small.tokenizer(), max_window_tokens=900)
    request.getfixturevalue("no_work")
    with pytest.raises(
        LimitError,
        match=r"Passage 1 \('p7'\) needs a window of 7\d\d tokens.*"
        r"1024 positions leave \d+ .*Set max_window_tokens=\d+",
    ):
        wide.generate("What?", ["One.", Passage(LONG, id="p7")], max_new_tokens=300)


@pytest.mark.usefixtures("no_work")
def test_sequential_names_the_passage_that_does_not_fit() -> None:
    passages = [Passage(LONG[:400], id=f"p{i}") for i in range(4)]
    passages[2] = Passage(LONG[:401], id="p2")
    passages[1] = Passage(LONG[:402], id="p1")
    with pytest.raises(LimitError, match=r"Passage 2 \('p2'\) has 403 tokens"):
        small.lm().generate("What?", passages, method="sequential", max_new_tokens=50)


@pytest.mark.usefixtures("no_work")
def test_a_query_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(LimitError, match="leave none for passages"):
        small.lm().generate("What? " * 200, ["One."])
