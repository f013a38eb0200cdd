"""The codebook as a method for passages that are given with a request."""

from __future__ import annotations

import pytest

from rag_windows import (
    APE,
    PCW,
    Codebook,
    DeepThinking,
    Linked,
    MateICL,
    Method,
    MethodError,
    ParallelEnsemble,
    Passage,
    Sequential,
    StructuredPrompting,
    WindowedLM,
)
from tests.drawn import questions
from tests.rag_windows import small
from tests.rag_windows.codebook.books import PASSAGES, QUESTION

LONG = Passage("a very long passage " * 12, id="long")


@pytest.mark.parametrize(
    "method",
    [
        Codebook(retrieve=3, reader=APE()),
        Codebook(retrieve=3, fusion="mean"),
        Codebook(retrieve=3, fusion="sum", reader=MateICL()),
        Codebook(retrieve=3, reader=StructuredPrompting()),
        Codebook(retrieve=3, fusion="mean", reader=StructuredPrompting()),
        Codebook(retrieve=3, reader=DeepThinking(2)),
        DeepThinking(2, reader=Codebook(retrieve=3)),
        Codebook(retrieve=3, reader=ParallelEnsemble()),
    ],
    ids=lambda method: f"{method.name}+{method.reader.name} {getattr(method, 'fusion', '')}",
)
def test_only_what_was_chosen_is_read_and_cited(method: Method) -> None:
    lm = small.lm()
    out = lm.generate(QUESTION, PASSAGES, method=method, max_new_tokens=3)
    read = [window.passage for window in out.windows]
    assert len(read) == 3
    assert read == sorted(read)
    assert out.citations is not None
    assert out.prefix_mass is not None
    assert out.query_mass is not None
    masses = [citation.mass for citation in out.citations]
    assert [index for index, mass in enumerate(masses) if mass > 0] == read
    assert sum(masses) + out.prefix_mass + out.query_mass == pytest.approx(1, abs=1e-5)
    assert lm.score(QUESTION, PASSAGES, ["a", "bc"], method=method)


def test_a_passage_of_several_windows_is_chosen_as_a_whole() -> None:
    lm = small.lm()
    tight = type(lm)(lm.model, lm.tokenizer, max_window_tokens=60)
    method = Codebook(retrieve=1)
    out = tight.generate("a very long passage", [*PASSAGES, LONG], method=method, max_new_tokens=2)
    parts = [window.part for window in out.windows if window.passage == len(PASSAGES)]
    assert parts == list(range(out.windows[0].parts))
    assert len(parts) > 2


def test_the_passage_that_holds_the_answer_is_found_and_read() -> None:
    """Of 16 passages a question; the names in all of them are held out from training."""
    lm = WindowedLM.from_pretrained("tiny-reader")
    found = right = 0
    for case in questions("16 passages"):
        book = lm.codebook(Codebook(retrieve=4, reader=PCW()))
        book.add(case.passages)
        out = lm.generate(case.question, book, max_new_tokens=12)
        titles = [book[str(one.id)].title for one in out.citations or ()]
        found += any(title is not None and title in case.question for title in titles)
        right += out.text.strip() == case.answer
    assert found >= 5
    assert right >= 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"similarity": "manhattan"}, "similarity"),
        ({"page": 0}, "page"),
        ({"reader": Sequential()}, "sequential"),
        ({"reader": Linked(4)}, "linked"),
        ({"reader": Codebook()}, "itself"),
        ({"fusion": "mean", "reader": ParallelEnsemble()}, "ensemble"),
    ],
)
def test_refused_by_name(options: dict[str, object], says: str) -> None:
    with pytest.raises(MethodError, match=says):
        Codebook(**options)  # type: ignore[arg-type]  # wrong on purpose
