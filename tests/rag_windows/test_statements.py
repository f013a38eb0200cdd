"""Sentences of an answer and the passages that carried them, on every way to an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rag_windows import Citation, Generation, WindowedLM
from rag_windows.citations import SUPPORT_NATS, judged
from rag_windows.integration import carried
from tests.rag_windows import small

PASSAGES = ["The mill is in Norby. It is old.", "Goats eat grass.", "A steep road leads there."]
ASKED: Mapping[str, Any] = {
    "query": "Where is it?",
    "passages": PASSAGES,
    "max_new_tokens": 40,
    "do_sample": True,
    "seed": 5,
}


@pytest.fixture(scope="module")
def lm() -> WindowedLM:
    return small.lm()


def check(made: Generation) -> None:
    """Statements lie in the text, in order."""
    end = 0
    for one in made.statements:
        assert end <= one.start < one.end <= len(made.text)
        assert one.text == made.text[one.start : one.end]
        end = one.end


def test_every_way_gives_the_same_statements(lm: WindowedLM) -> None:
    for method in ("ape", "pced"):
        asked: dict[str, Any] = {**ASKED, "method": method}
        alone = lm.generate(**asked)
        check(alone)
        assert alone.statements
        (batched,) = lm.generate_batch([asked])
        *_, last = lm.stream(**asked)
        assert last.generation is not None
        for other in (batched, last.generation):
            pairs = zip(alone.statements, other.statements, strict=True)
            for one, two in pairs:
                assert (one.start, one.end, one.text) == (two.start, two.end, two.text)
                for mine, theirs in zip(one.citations, two.citations, strict=True):
                    assert mine.passage == theirs.passage
                    assert mine.mass == pytest.approx(theirs.mass, abs=1e-5)


def test_one_sentence_has_the_whole_answers_citations(lm: WindowedLM) -> None:
    made = lm.generate(**{**ASKED, "do_sample": False, "max_new_tokens": 3})
    if len(made.statements) == 1:
        for one in made.statements[0].citations:
            whole = (made.citations or ())[one.passage]
            assert one.mass == pytest.approx(whole.mass, abs=0.05)


def test_rows_of_a_batch_that_come_and_go_keep_their_tokens_weights(lm: WindowedLM) -> None:
    asked = [{**ASKED, "max_new_tokens": n, "seed": n} for n in (2, 9, 30)]
    for request, made in zip(asked, lm.generate_batch(asked, max_rows=2), strict=True):
        alone = lm.generate(**request)
        assert made.token_ids == alone.token_ids
        for one, two in zip(made.citations or (), alone.citations or (), strict=True):
            assert one.mass == pytest.approx(two.mass, abs=1e-5)
        for mine, theirs in zip(made.statements, alone.statements, strict=True):
            assert [one.passage for one in mine.citations] == [
                one.passage for one in theirs.citations
            ]


def test_stop_strings_and_missing_citations(lm: WindowedLM) -> None:
    whole = lm.generate(**ASKED)
    stop = whole.text[len(whole.text) // 2 :][:2]
    cut = lm.generate(**{**ASKED, "stop": stop})
    check(cut)
    assert lm.generate(**{**ASKED, "citations": False}).statements == ()
    assert lm.generate("Hello?", [], max_new_tokens=4).statements == ()


READ = (0, 1, 2)


def citation(passage: int, mass: float) -> Citation:
    return Citation(passage, None, mass)


def test_what_removals_say() -> None:
    given = [citation(0, 0.5), citation(1, 0.4), citation(2, 0.05), citation(3, 0.0)]
    clear = judged(given, {0: SUPPORT_NATS + 1, 1: 0.1, 2: -1.0}, gain=8.0, read=READ)
    assert [one.supports for one in clear] == ["yes", "no", "no", "no"]
    assert [one.passage for one in carried(clear)] == [0]
    assert clear[3].drop == 0.0
    # Two passages say the same, so that neither is missed.
    shared = judged(given, {0: 0.2, 1: 0.3, 2: 0.0}, gain=8.0, read=READ)
    assert [one.supports for one in shared] == ["unsure", "unsure", "no", "no"]
    assert [one.passage for one in carried(shared)] == [1, 0]
    # What it hurts to read is no source.
    hurt = judged(given, {0: -5.0, 1: 1.0, 2: 0.0}, gain=4.0, read=READ)
    assert [one.supports for one in hurt] == ["no", "unsure", "no", "no"]
    # No passage makes the answer likelier: it is not from them.
    invented = judged(given, {0: 0.2, 1: 3.0, 2: 0.0}, gain=0.5, read=READ)
    assert carried(invented) == ()
    beyond_top = judged(given, {0: SUPPORT_NATS}, gain=8.0, read=READ)
    assert [one.supports for one in beyond_top] == ["yes", None, None, "no"]
