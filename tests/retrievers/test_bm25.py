from __future__ import annotations

import math
import re

import pytest

from rag_windows import InputError, Passage, RetrievalError
from rag_windows_retrievers import BM25Retriever

CORPUS = [
    Passage("The bridge of Halden was built in 1931.", id="bridge"),
    Passage("A harbour lies behind the dunes.", id="harbour", title="Halden"),
    Passage("Zürich has lakes. Who knows why?", id="lakes"),
    Passage("The the the was of.", id="grammar"),
]


def ids(query: str, k: int = 8) -> list[str | None]:
    return [one.id for one in BM25Retriever(CORPUS).retrieve(query, k)]


def test_titles_and_texts_are_searched() -> None:
    assert ids("harbour in Halden?") == ["harbour", "bridge"]


def test_scores_follow_the_formula() -> None:
    (hit,) = BM25Retriever(CORPUS, k1=1.2, b=0.5).retrieve("bridge")
    lengths = [len(re.findall(r"\w+", f"{one.title or ''} {one.text}")) for one in CORPUS]
    average = sum(lengths) / len(lengths)
    idf = math.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    expected = idf / (1 + 1.2 * (0.5 + 0.5 * lengths[0] / average))
    assert hit.score == pytest.approx(expected, rel=1e-5)
    assert hit.text == CORPUS[0].text
    assert CORPUS[0].score is None


def test_words_are_folded() -> None:
    assert ids("ZÜRICH") == ids("ﬁnd Zu\u0308rich") == ["lakes"]


def test_function_words_count_only_alone() -> None:
    assert ids("who was in the lakes?") == ["lakes"]
    assert ids("the of") == ["grammar", "bridge", "harbour"]


def test_scripts_without_spaces() -> None:
    retriever = BM25Retriever([Passage("大阪は西にある"), Passage("東京は東にある")])
    assert retriever.retrieve("東京はどこ?", 1)[0].text == "東京は東にある"


def test_fewer_hits_than_asked_for() -> None:
    assert ids("Halden", 1_000_000) == ["harbour", "bridge"]
    assert ids("xylophone") == []
    assert ids("") == []
    assert ids("?!") == []


def test_ties_keep_the_corpus_order() -> None:
    retriever = BM25Retriever([Passage("same words", id=str(i)) for i in range(100)])
    assert [one.id for one in retriever.retrieve("same", 20)] == [str(i) for i in range(20)]


def test_repeated_words_weigh_more() -> None:
    assert ids("lakes lakes lakes bridge")[0] == "lakes"
    assert ids("lakes bridge bridge bridge")[0] == "bridge"


def test_what_is_refused() -> None:
    with pytest.raises(RetrievalError, match="no passages"):
        BM25Retriever([])
    with pytest.raises(RetrievalError, match="No passage holds a word"):
        BM25Retriever([Passage("..."), Passage("")])
    with pytest.raises(InputError, match="k must be at least 1"):
        ids("Halden", 0)
    for k1, b in ((-1.0, 0.5), (1.0, 1.5), (math.nan, 0.5)):
        with pytest.raises(InputError, match="k1 >= 0"):
            BM25Retriever(CORPUS, k1=k1, b=b)


def test_passages_without_words_do_no_harm() -> None:
    retriever = BM25Retriever([Passage(""), Passage("word")])
    assert [one.text for one in retriever.retrieve("word", 2)] == ["word"]


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    ids("Halden")
    assert capfd.readouterr() == ("", "")
