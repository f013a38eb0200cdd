from __future__ import annotations

import pytest

from rag_windows.errors import InputError
from rag_windows.evaluation.data.chatrag_form import (
    WORDINGS,
    check_style,
    titled,
    united,
    worded,
)
from rag_windows.passage import Passage


def said(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)
    ]


LONG = "Please give a full and complete answer for the question. "


def test_there_are_ten_datasets_one_in_three_domains() -> None:
    assert set(WORDINGS) == set(
        "doc2dial quac qrecc topiocqa inscit coqa hybridial sqa doqa_cooking doqa_travel "
        "doqa_movies convfinqa".split()
    )


@pytest.mark.parametrize(
    "dataset",
    "doc2dial quac qrecc inscit doqa_cooking doqa_travel doqa_movies hybridial convfinqa".split(),
)
def test_long_answers_are_asked_for_once_at_the_start(dataset: str) -> None:
    found = worded(said("q1", "a1", "q2"), dataset)
    assert [one["content"] for one in found] == [f"{LONG}q1", "a1", "q2"]


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (
            "topiocqa",
            "Answer the following question with a short span, or a full and complete answer. ",
        ),
        ("sqa", "Answer the following question with one or a list of items. "),
        (
            "coqa",
            "Answer the following question with a short span. "
            "The answer needs to be just in a few words. ",
        ),
    ],
)
def test_other_answers_are_asked_for_at_the_end(dataset: str, text: str) -> None:
    found = worded(said("q1", "a1", "q2"), dataset)
    assert [one["content"] for one in found] == ["q1", "a1", f"{text}q2"]


def test_only_the_last_seven_messages_stay() -> None:
    talk = said("q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4", "q5")
    found = worded(talk, "quac")
    assert [one["content"] for one in found] == [f"{LONG}q2", "a2", "q3", "a3", "q4", "a4", "q5"]
    assert talk == said("q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4", "q5")


def test_the_wording_skips_an_assistant_that_is_left_first() -> None:
    talk = [*said("q1", "a1", "q2", "a2", "q3", "a3"), *said("q4"), *said("q5")]
    found = worded(talk, "quac")
    assert [one["content"] for one in found] == ["a1", f"{LONG}q2", "a2", "q3", "a3", "q4\n\nq5"]


def test_messages_of_one_role_become_one() -> None:
    talk = [*said("a"), *said("b", "c")]
    assert united(talk) == tuple(said("a\n\nb", "c"))
    assert [one["content"] for one in talk] == ["a", "b", "c"]


def test_titles_stand_in_the_text() -> None:
    one = titled(Passage("Text.", "p", "T", 0.5))
    assert (one.text, one.id, one.title, one.score) == ("title: T, source: Text.", "p", None, 0.5)
    assert one.metadata == {"title": "T"}
    bare = Passage("Text.", "p")
    assert titled(bare) is bare


def test_unknown_styles_are_refused() -> None:
    check_style("plain")
    with pytest.raises(InputError, match="use one of chatrag, plain"):
        check_style("official")
