"""How many tokens are linked, what is refused, and what a request with linked tokens gives."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rag_windows import (
    APE,
    PCW,
    LimitError,
    Linked,
    MateICL,
    MethodError,
    ParallelEnsemble,
    PassageCache,
    Sequential,
)
from rag_windows.methods import StructuredPrompting, linked, resolve
from rag_windows.methods.steps import Recompute
from tests.rag_windows import small

PASSAGES = [
    {"text": "The tower is old.", "id": "tower"},
    {"text": "The river is wide and slow.", "title": "River"},
    {"text": "The bridge is new."},
]


def answer(**options: Any) -> Any:
    return small.lm().generate("What?", PASSAGES, max_new_tokens=12, do_sample=False, **options)


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        (0, [0, 0, 0]),
        (0.0, [0, 0, 0]),
        (1, [1, 1, 1]),
        (5, [5, 3, 5]),
        (0.15, [3, 1, 2]),
        (0.5, [10, 2, 5]),
        (1.0, [20, 3, 9]),
        ("all", [20, 3, 9]),
        (20, [20, 3, 9]),
    ],
)
def test_counts(tokens: Any, counts: list[int]) -> None:
    lengths = [20, 3, 9]
    plan = Recompute(tokens)
    assert plan.counts(lengths) == counts
    assert plan.nothing == (sum(counts) == 0)
    assert plan.everything(lengths) == (counts == lengths)


@pytest.mark.parametrize("tokens", [-1, -0.1, 1.1, float("nan"), "most", None, True, [1]])
def test_numbers_outside_their_domain_are_refused(tokens: Any) -> None:
    with pytest.raises(MethodError, match="is a usual start"):
        Linked(tokens)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(MethodError, match="'first', 'deviation'"):
        answer(link_tokens=3, link_choose="last")


@pytest.mark.parametrize(
    ("reader", "hint"),
    [
        (ParallelEnsemble(), "ensemble.*alone"),
        (StructuredPrompting(), "structured-prompting.*mateicl"),
        (Linked(3), "itself"),
        (Sequential(), "sequential"),
    ],
)
def test_readers_that_cannot_be_linked_are_refused(reader: Any, hint: str) -> None:
    with pytest.raises(MethodError, match=hint):
        Linked(reader=reader)


def test_readers_that_can() -> None:
    assert Linked(0.3, reader=MateICL()).query_weight(9) == MateICL().query_weight(9)
    assert resolve("linked+ape") == Linked(reader=APE())
    assert Linked(0, reader=APE()).alignment == "left"
    assert Linked(0, reader=APE()).recompute is None
    assert Linked(2).alignment == "in order"


def test_sequential_is_linked_already() -> None:
    assert linked(Sequential(), 5) == Sequential()
    assert linked(APE(), None) == APE()
    with pytest.raises(MethodError):
        linked(Sequential(), -5)


def test_the_ends_are_the_parallel_and_the_ordinary_answer() -> None:
    assert answer(link_tokens=0).token_ids == answer().token_ids
    assert answer(link_tokens="all").token_ids == answer(method="sequential").token_ids
    one, other = answer(link_tokens=0.4), answer(method=Linked(0.4, reader=APE()))
    assert one.token_ids == other.token_ids
    assert one.citations == other.citations


@pytest.mark.parametrize("choose", ["first", "deviation"])
def test_citations_stay_with_their_passages(choose: Any) -> None:
    made = answer(link_tokens=3, link_choose=choose)
    assert [(citation.passage, citation.id) for citation in made.citations] == [
        (0, "tower"),
        (1, None),
        (2, None),
    ]
    total = sum(citation.mass for citation in made.citations)
    assert total + made.prefix_mass + made.query_mass == pytest.approx(1)
    assert [window.passage for window in made.windows] == [0, 1, 2]


def test_what_a_cache_can_reuse() -> None:
    lm = small.lm().with_cache(PassageCache())

    request = lm.engine.request("What?", PASSAGES, prefix=None, method=None)
    prefix = len(request.parts.prefix_ids)

    def used(passages: Any, tokens: Any = 4) -> tuple[int, int]:
        made = lm.generate("What?", passages, max_new_tokens=1, link_tokens=tokens)
        cached = made.usage.cached_tokens
        return max(0, cached - prefix), sum(len(window.ids) for window in made.windows)

    assert used(PASSAGES)[0] == 0
    cached, total = used(PASSAGES)
    assert cached == total - 4 * 2  # the first window's tokens are not run again
    assert used(PASSAGES, tokens=2)[0] == total - 2 * 2
    first = used(PASSAGES[:1])[1]
    assert used([PASSAGES[0], PASSAGES[2], PASSAGES[1]])[0] == first
    assert used(PASSAGES, tokens="all")[0] == 0


def test_all_windows_together_have_to_fit() -> None:
    passages = [f"{name} {'x' * 300}" for name in "abcd"]
    small.lm().generate("What?", passages, max_new_tokens=1)
    with pytest.raises(LimitError, match="'ape'"):
        small.lm().generate("What?", passages, max_new_tokens=1, link_tokens=4)


def test_threads_with_other_links() -> None:
    options = [{"link_tokens": tokens} for tokens in (0, 1, 0.5, "all")] * 2
    alone = [answer(**one).token_ids for one in options]
    found: list[Any] = [None] * len(options)

    def work(index: int) -> None:
        found[index] = answer(**options[index]).token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(options))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_pcw_is_the_default_reader() -> None:
    assert Linked().reader == PCW()
