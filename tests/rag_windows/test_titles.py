"""Passages that a chosen one names by their titles, and what is then read."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rag_windows import Passage, QueryLikelihood, Sequential, WindowedLM
from rag_windows.titles import Titles
from tests.rag_windows import small

HEAT = "Heat was directed by Mara Olin, who also wrote The Long Rain (C++). It is no Bo-Tar film."


@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("Mara Olin", True),
        ("Mara Olin (director)", True),
        ("  Mara Olin ", True),
        ("The Long Rain", True),
        ("Bo-Tar", True),
        ("Mara", True),
        ("Mar", False),
        ("mara olin", False),
        ("Long", True),
        ("is", False),
        ("Heat", False),
        ("Heat (film)", False),
        ("(film)", False),
        ("", False),
        (None, False),
        ("M.ra Olin", False),
        ("C++", True),
        ("(a+)+$", False),
    ],
)
def test_what_is_named(title: str | None, named: bool) -> None:
    passages = Passage(HEAT, title="Heat (1995)"), Passage("Mara was born.", title=title)
    assert Titles(passages, "Who made it?").named_by(0) == ({1} if named else frozenset())
    assert Titles(passages, "").named_by(1) == frozenset()


@pytest.mark.parametrize("asked", ["Who is Mara Olin?", "where was MARA OLIN born", "mara  olin"])
def test_what_the_user_names_is_no_bridge(asked: str) -> None:
    passages = Passage(HEAT, title="Heat"), Passage("x", title="Mara Olin")
    known = "  " not in asked
    assert Titles(passages, asked).named_by(0) == (frozenset() if known else {1})


def test_long_titles_take_no_time() -> None:
    passages = Passage("a-" * 100_000, title="A"), *[Passage("x", title="a-" * 100)] * 20
    begun = time.perf_counter()
    Titles(passages, "?").named_by(0)
    assert time.perf_counter() - begun < 5


FILM = [
    Passage("Heat was directed by Mara Olin.", title="Heat"),
    Passage("Bo Tar was born in Birholm.", title="Bo Tar"),
    Passage("Mara Olin was born in Sulava.", title="Mara Olin"),
    Passage("Oska Vim was born in Birmouth. He knew Ona Rul.", title="Oska Vim"),
    Passage("Ona Rul made cheese.", title="Ona Rul"),
]
ASKED = "Where was the director of the film born?"


@pytest.fixture(scope="module")
def lm() -> WindowedLM:
    return small.wrapped()


def read(lm: WindowedLM, passages: list[Passage], rule: QueryLikelihood, query: Any = ASKED) -> Any:
    made = lm.generate(query, passages, method=rule, max_new_tokens=2, do_sample=False)
    return [window.passage for window in made.windows]


def test_what_the_first_names_comes_second(lm: WindowedLM) -> None:
    """Whichever comes first, by a rule that knows no names."""
    seen = set()
    for turn in range(len(FILM)):
        passages = FILM[turn:] + FILM[:turn]
        ranks = read(lm, passages, QueryLikelihood(4, reader=Sequential()))
        ranks += {*range(5)} - {*ranks}
        named = Titles(tuple(passages), ASKED).named_by(ranks[0])
        second = next((one for one in ranks[1:] if one in named), ranks[1])
        seen.add(second == ranks[1])
        found = read(lm, passages, QueryLikelihood(2, bridge=100.0, reader=Sequential()))
        assert found == [ranks[0], second]
        assert read(lm, passages, QueryLikelihood(2, bridge=1e-9, reader=Sequential())) == ranks[:2]
    assert False in seen, "names never decided"


def test_names_of_names_count_where_more_are_read(lm: WindowedLM) -> None:
    names = ["Aba Lom", "Ceda Ris", "Dor Min", "Ema Tal", "Fil Oska"]
    for step in (1, 2):
        # Whichever comes first, the next ones are known.
        passages = [
            Passage(f"{one} knew {names[(index + step) % 5]}.", title=one)
            for index, one in enumerate(names)
        ]
        (first,) = read(lm, passages, QueryLikelihood(1, reader=Sequential()))
        chain = read(lm, passages, QueryLikelihood(3, bridge=1000.0, reader=Sequential()))
        assert chain == [(first + hop * step) % 5 for hop in range(3)]


def test_a_score_reads_what_an_answer_reads(lm: WindowedLM) -> None:
    rule = QueryLikelihood(2, bridge=100.0, reader=Sequential())
    chosen = [FILM[index] for index in read(lm, FILM, rule)]
    (found,) = lm.score(ASKED, FILM, ["Sulava"], method=rule)
    (wanted,) = lm.score(ASKED, chosen, ["Sulava"], method="sequential")
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_what_was_said_before_is_no_bridge(lm: WindowedLM) -> None:
    rule = QueryLikelihood(2, bridge=100.0, reader=Sequential())
    conversation = [
        {"role": "user", "content": "Do you know Mara Olin and Ona Rul?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": ASKED},
    ]
    plain = QueryLikelihood(2, reader=Sequential())
    assert read(lm, FILM, rule, conversation) == read(lm, FILM, plain, conversation)
