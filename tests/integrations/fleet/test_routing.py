"""Which replica a question goes to: properties that hold whatever the fleet looks like."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows import Passage, PassageCache
from rag_windows.integration import labels_of
from rag_windows_server.fleet import routing
from rag_windows_server.fleet.routing import Replica, RoutedQuestion, resident

NUMBERS = st.integers(0, 11)
LOADS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])
PASSAGE = Passage("Vara Zelmont was born in Sulava.", id="vara-1", title="Vara Zelmont")


@st.composite
def questions(draw: st.DrawFn) -> RoutedQuestion:
    asked = draw(st.lists(st.tuples(NUMBERS, st.integers(0, 5000)), max_size=6))
    home = draw(st.integers(0, 2**64 - 1))
    return RoutedQuestion(tuple(one for one, _ in asked), tuple(size for _, size in asked), home)


@st.composite
def fleets(draw: st.DrawFn, least: int = 0) -> list[Replica]:
    names = draw(st.lists(st.text(max_size=3), min_size=least, max_size=7, unique=True))
    return [Replica(name, draw(st.frozensets(NUMBERS)), draw(LOADS)) for name in names]


def names(question: RoutedQuestion, fleet: list[Replica]) -> list[str]:
    return [fleet[index].name for index in resident(question, fleet)]


@given(question=questions(), fleet=fleets())
def test_a_choice_names_every_replica_once(question: RoutedQuestion, fleet: list[Replica]) -> None:
    assert sorted(resident(question, fleet)) == list(range(len(fleet)))


@given(question=questions(), fleet=fleets(), data=st.data())
def test_the_order_in_which_replicas_are_listed_does_not_matter(
    question: RoutedQuestion, fleet: list[Replica], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(fleet))
    assert names(question, fleet) == names(question, shuffled)


@given(questions(), fleets(least=2))
def test_who_holds_more_and_has_no_more_load_is_not_ranked_behind(
    question: RoutedQuestion, fleet: list[Replica]
) -> None:
    sizes = Counter[int]()
    for number, size in zip(question.digests, question.sizes, strict=True):
        sizes[number] += size
    order = resident(question, fleet)
    for place, index in enumerate(order):
        for other in order[place + 1 :]:
            held, more = (sum(sizes[n] for n in fleet[one].held) for one in (index, other))
            assert held >= more or fleet[index].load < fleet[other].load


@pytest.mark.slow
@given(question=questions(), fleet=fleets(least=1), data=st.data())
def test_a_replica_that_is_lost_moves_its_own_questions_only(
    question: RoutedQuestion, fleet: list[Replica], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(fleet))
    rest = [one for one in fleet if one is not lost]
    left = [one for one in names(question, fleet) if one != lost.name]
    assert names(question, rest) == left


def test_questions_that_nobody_knows_spread_over_idle_replicas() -> None:
    fleet = [Replica(f"r{index}", frozenset(), 0.0) for index in range(8)]
    asked = [
        RoutedQuestion((number,), (100,), routing.home_of("tenant", str(number)))
        for number in range(4000)
    ]
    first = Counter(resident(one, fleet)[0] for one in asked)
    assert all(400 < first[index] < 600 for index in range(8))


def test_what_is_resident_outweighs_load_up_to_its_share() -> None:
    question = RoutedQuestion((1, 2, 3, 3), (100, 100, 100, 100), 0)
    most = 0.5 / routing.LOAD_SHARE  # of questions more, for half of the passages
    idle, busy = Replica("idle", frozenset(), 0.0), Replica("busy", frozenset({3, 9}), 0.9 * most)
    assert names(question, [idle, busy]) == ["busy", "idle"]
    assert names(question, [idle, replace(busy, load=1.1 * most)]) == ["idle", "busy"]


def test_what_was_sent_counts_as_held_until_the_replica_had_time_to_publish_it() -> None:
    known = routing.Held()
    known.sent((1, 2), now=10.0)
    assert known.numbers == {1, 2}
    known.published({3}, now=11.0)  # before it has encoded what was sent
    seen = Replica("r", known.numbers, 0.0)
    known.sent((4,), now=13.0)
    assert 4 in seen.held
    assert known.numbers == {1, 2, 3, 4}
    known.published({1, 3}, now=10.0 + routing.SENT_S)  # it did not keep 2
    assert known.numbers == {1, 3, 4}
    assert not known.late(now=19.0)
    assert known.late(now=20.0)
    known.published({1, 3}, now=20.0)  # nor 4: it says what it said before
    assert known.numbers == {1, 3}
    assert not known.late(now=100.0)


@given(st.frozensets(st.integers(0, 2**32 - 1)))
def test_what_is_published_takes_four_bytes_a_passage_and_comes_back(held: frozenset[int]) -> None:
    packed = routing.pack(iter(held))
    assert len(packed) == 4 * len(held)
    assert routing.unpack(packed) == held


def test_bytes_that_no_replica_publishes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        routing.unpack(b"12345")


@pytest.mark.parametrize("salt", [None, "ours", b"ours"])
def test_a_passage_has_the_number_that_a_cache_gives_its_content(
    salt: str | bytes | None,
) -> None:
    cache = PassageCache("1MB", salt=salt)
    (digest,) = cache.digests(labels_of(PASSAGE)[0])
    number = routing.passage_number(salt, PASSAGE)
    assert number == routing.number_of(digest) < 2**32
    assert routing.passage_number(b"ours", PASSAGE) == routing.passage_number("ours", PASSAGE)


def test_numbers_tell_titles_texts_and_tenants_apart_and_nothing_else() -> None:
    others = [
        replace(PASSAGE, title=None),
        replace(PASSAGE, text="Vara Zelmont"),
        replace(PASSAGE, title=PASSAGE.text, text="Vara Zelmont"),
        replace(PASSAGE, title="", text="Vara ZelmontVara Zelmont was born in Sulava."),
        replace(PASSAGE, text="\udc80"),
    ]
    made = {routing.passage_number("ours", one) for one in (PASSAGE, *others)}
    assert len(made) == 6
    assert routing.passage_number("theirs", PASSAGE) not in made
    same = replace(PASSAGE, id="other", score=1.0, metadata={"source": "x"})
    assert routing.passage_number("ours", same) == routing.passage_number("ours", PASSAGE)
    assert routing.home_of("a", "bc") != routing.home_of("ab", "c")
