"""A book of passages in memory: what goes in and out, and what requests read of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rag_windows import (
    APE,
    PCW,
    Codebook,
    DeepThinking,
    InputError,
    Linked,
    MethodError,
    ParallelEnsemble,
    Passage,
    Sequential,
    StructuredPrompting,
    WindowedLM,
)
from tests.rag_windows import small
from tests.rag_windows.codebook.books import METHOD, PASSAGES, QUESTION, TOPICS, book


def test_it_reads_what_the_method_reads_of_all_passages() -> None:
    held = book()
    held.add(PASSAGES)
    lm = small.lm()
    out = lm.generate(QUESTION, held, max_new_tokens=5)
    given = lm.generate(QUESTION, PASSAGES, method=METHOD, max_new_tokens=5)
    assert {window.passage for window in given.windows} == {
        TOPICS.index(str(citation.id)) for citation in out.citations or ()
    }
    found = held.search(QUESTION)
    assert [one.passage.id for one in found] == [citation.id for citation in out.citations or ()]
    assert found[0].similarity >= found[1].similarity >= found[2].similarity
    again = lm.generate(QUESTION, [one.passage for one in found], method=APE(), max_new_tokens=5)
    assert out.token_ids == again.token_ids
    assert out.usage.cached_tokens > 0.7 * out.usage.prompt_tokens
    *_, last = lm.stream(QUESTION, held, max_new_tokens=5)
    assert last.generation is not None
    assert last.generation.token_ids == out.token_ids
    scores = lm.score(QUESTION, held, ["a", "bc"])
    expected = lm.score(QUESTION, [one.passage for one in found], ["a", "bc"], method=APE())
    assert [one.logprob for one in scores] == pytest.approx([one.logprob for one in expected])
    batch = lm.score_batch([QUESTION, "what sings?"], held, ["a", "bc"])
    assert batch[0] == scores
    assert batch[1] == lm.score("what sings?", held, ["a", "bc"])


def test_passages_come_and_go() -> None:
    held = book()
    added = held.add([*PASSAGES, "one without a name"])
    assert added.ids[:-1] == TOPICS
    assert (added.evicted, added.notes) == ((), ())
    assert len(held) == 8
    assert held.ids == added.ids
    assert held.add(["one without a name", PASSAGES[0]]).ids == (added.ids[-1], "cats")
    assert len(held) == 8
    held.update([Passage("whales sing", id="whales", title="Song")])
    assert held["whales"].title == "Song"
    assert held.ids == added.ids
    held.remove("fish")
    held.remove(["dogs", "trees"])
    assert held.ids == ("cats", "birds", "whales", "stones", added.ids[-1])
    assert [passage.id for passage in held] == list(held.ids)
    assert "fish" not in held
    assert "whales" in held
    found = held.search("whales sing", 9)
    assert {one.passage.id for one in found} == set(held.ids)
    assert "whales sing" in [one.passage.text for one in found]
    held.clear()
    assert len(held) == 0
    assert held.search(QUESTION) == []
    assert held.cache.stats().tiers["memory"].entries <= 1  # the prefix
    lm = small.lm()
    assert lm.generate(QUESTION, held, max_new_tokens=3).token_ids == (
        lm.generate(QUESTION, max_new_tokens=3).token_ids
    )


def test_what_can_not_be_kept_changes_nothing() -> None:
    held = book(method=replace(METHOD, size=3))
    held.add(PASSAGES[:2])
    refused: tuple[tuple[Callable[[Any], object], object, str], ...] = (
        (held.add, [Passage("another text", id="cats")], "update"),
        (held.add, [Passage("one", id="new"), Passage("two", id="new")], "Two different"),
        (held.add, PASSAGES[:4], "size=3"),
        (held.add, "a single one", "list"),
        (held.update, [Passage("text", id="unknown")], "unknown"),
        (held.update, [Passage(" ", id="cats")], "blank"),
        (held.remove, ["cats", "unknown"], "unknown"),
        (partial(held.search, QUESTION), 0, "retrieve"),
    )
    for call, value, says in refused:
        with pytest.raises(InputError, match=says):
            call(value)
    assert held.ids == ("cats", "dogs")


def test_blank_and_split_passages_are_told() -> None:
    lm = small.lm()
    tight = WindowedLM(lm.model, lm.tokenizer, max_window_tokens=60)
    held = tight.codebook(METHOD)
    added = held.add(["  ", PASSAGES[0], "a very long passage " * 12])
    assert added.ids[0] is None
    assert added.ids[1] == "cats"
    assert [(note.kind, note.passage) for note in added.notes] == [("blank", 0), ("split", 2)]
    assert len(held) == 2
    assert {one.passage.id for one in held.search(QUESTION)} == set(held.ids)


def test_those_that_were_not_found_for_the_longest_time_go_and_are_told() -> None:
    held = book(method=replace(METHOD, size=4, retrieve=1))
    held.add(PASSAGES[:4])
    (found,) = {one.passage.id for one in held.search(QUESTION)}
    unfound = [topic for topic in TOPICS[:4] if topic != found]
    assert held.add([PASSAGES[4]]).evicted == (unfound[0],)
    assert held.add(PASSAGES[5:7]).evicted == tuple(unfound[1:])
    assert set(held.ids) == {found, *TOPICS[4:]}


def test_any_method_of_equal_windows_reads_it() -> None:
    held = book()
    held.add(PASSAGES)
    lm = small.lm()
    chosen = [one.passage for one in held.search(QUESTION)]
    for method in (PCW(), ParallelEnsemble(), "mateicl"):
        out = lm.generate(QUESTION, held, method=method, max_new_tokens=3)
        assert out.token_ids == (
            lm.generate(QUESTION, chosen, method=method, max_new_tokens=3).token_ids
        )
    fewer = lm.generate(QUESTION, held, method=Codebook(retrieve=2), max_new_tokens=2)
    assert len(fewer.windows) == 2
    for refused in (
        Sequential(),
        StructuredPrompting(),
        DeepThinking(),
        Linked(3),
        Codebook(page=2),
    ):
        with pytest.raises(MethodError, match=refused.name):
            lm.generate(QUESTION, held, method=refused)


def test_it_belongs_to_one_model_prefix_and_header() -> None:
    lm = small.lm()
    held = book(prefix="Be brief.")
    held.add(PASSAGES)
    lm.generate(QUESTION, held, max_new_tokens=2)
    lm.generate(QUESTION, held, prefix="Be brief.", max_new_tokens=2)
    with pytest.raises(InputError, match="another prefix"):
        lm.generate(QUESTION, held, prefix="Be long.")
    other = WindowedLM(small.model(1), small.tokenizer())
    with pytest.raises(InputError, match="another model"):
        other.generate(QUESTION, held)
    numbered = WindowedLM(small.model(), small.tokenizer(), header="number")
    with pytest.raises(InputError, match="number"):
        numbered.codebook()
    with pytest.raises(InputError, match="don't begin behind the prefix"):
        lm.codebook(StructuredPrompting())
    assert lm.codebook("pcw").method == Codebook(reader=PCW())
