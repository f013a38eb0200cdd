"""What each retriever ranks by."""

from __future__ import annotations

import math
import re

import pytest

from rag_windows import InputError, Passage, RetrievalError
from rag_windows_retrievers import BM25Retriever, DenseRetriever, HybridRetriever, ScoredPassage
from tests.retrievers.small import CORPUS, WordEncoder

WORDS = [*CORPUS[:3], Passage("The the the was of.", id="grammar")]


def ids(query: str, k: int = 8) -> list[str | None]:
    return [one.id for one in BM25Retriever(WORDS).retrieve(query, k)]


def test_bm25_follows_the_formula(capfd: pytest.CaptureFixture[str]) -> None:
    (hit,) = BM25Retriever(WORDS).retrieve("bridge")
    lengths = [len(re.findall(r"\w+", f"{one.title or ''} {one.text}")) for one in WORDS]
    idf = math.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    average = sum(lengths) / len(lengths)
    expected = idf / (1 + 1.5 * (0.25 + 0.75 * lengths[0] / average))
    assert hit.score == pytest.approx(expected, rel=1e-5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("harbour in Halden?", ["harbour", "bridge"]),
        ("ZÜRICH", ["lakes"]),
        ("ﬁnd Zu\u0308rich", ["lakes"]),
        ("who was in the lakes?", ["lakes"]),
        ("the of", ["grammar", "bridge", "harbour"]),
        ("lakes bridge bridge bridge", ["bridge", "lakes"]),
        ("xylophone", []),
        ("?!", []),
    ],
)
def test_bm25_finds_words_of_titles_and_texts(query: str, found: list[str]) -> None:
    assert ids(query) == found


def test_bm25_reads_scripts_without_spaces_and_keeps_the_order_of_ties() -> None:
    retriever = BM25Retriever([Passage("大阪は西にある"), Passage("東京は東にある"), Passage("")])
    assert retriever.retrieve("東京はどこ?", 1)[0].text == "東京は東にある"
    retriever = BM25Retriever([Passage(f"same {i}", id=str(i)) for i in range(100)])
    assert [one.id for one in retriever.retrieve("same", 20)] == [str(i) for i in range(20)]


def test_dense_scores_are_cosines_of_titles_and_texts() -> None:
    encoder = WordEncoder()
    retriever = DenseRetriever([*CORPUS, *CORPUS], encoder)
    assert len(encoder.asked) == len(CORPUS)
    hits = DenseRetriever(CORPUS, encoder).retrieve("The bridge of Halden", 2)
    assert [one.id for one in hits] == ["bridge", "arches"]
    one, two = encoder.embed(["The bridge of Halden", CORPUS[0].text], query=True)
    assert hits[0].score == pytest.approx(float(one @ two), abs=1e-6)
    assert retriever.retrieve("Old town", 1)[0].id == "bread"


def test_dense_asks_with_the_mean_of_paragraphs() -> None:
    encoder = WordEncoder()
    (hit,) = DenseRetriever(CORPUS, encoder).retrieve("lakes\n\nbridge\n \nbridge", 1)
    one, two, passage = encoder.embed(["lakes", "bridge", hit.text], query=True)
    assert hit.score == pytest.approx(float((one + 2 * two) @ passage) / 3, abs=1e-6)


class Fixed:
    """Always finds the same ids, each of a text of its own."""

    def __init__(self, ids: str, text: str = "text") -> None:
        self.ids, self.text = ids, text
        self.asked: list[int] = []

    def retrieve(self, query: str, k: int = 8) -> list[ScoredPassage]:
        self.asked.append(k)
        found = enumerate(self.ids)
        return [Passage(f"{self.text} {one}", id=one, score=9.0 - i) for i, one in found][:k]


def test_hybrid_follows_the_formula() -> None:
    one, two = Fixed("aabc"), Fixed("cd")
    hits = HybridRetriever([one, two], weights=[1, 2], depth=20).retrieve("q")
    scores = {one.id: one.score for one in hits}
    assert [one.id for one in hits] == ["c", "d", "a", "b"]
    assert scores["c"] == pytest.approx(1 / 63 + 2 / 61)
    assert scores["a"] == pytest.approx(1 / 61)
    HybridRetriever([one], depth=20).retrieve("q", 30)
    assert one.asked == [20, 30]


def test_hybrid_keeps_the_order_of_ties_and_texts_of_one_id_apart() -> None:
    hits = HybridRetriever([Fixed("abc"), Fixed("xyz")]).retrieve("q")
    assert "".join(str(one.id) for one in hits) == "axbycz"
    assert len(HybridRetriever([Fixed("a"), Fixed("a", "another text")]).retrieve("q")) == 2


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="at least one retriever"):
        HybridRetriever([])
    for weights in ([1.0], [1.0, math.nan]):
        with pytest.raises(InputError, match="for each a weight above 0"):
            HybridRetriever([Fixed("a"), Fixed("b")], weights=weights)


@pytest.mark.parametrize("texts", [[], [" ", ""]])
def test_a_corpus_needs_text(texts: list[str]) -> None:
    passages = [Passage(text) for text in texts]
    with pytest.raises(RetrievalError, match="No passage holds a word"):
        BM25Retriever(passages)
    with pytest.raises(RetrievalError, match="no text to search"):
        DenseRetriever(passages, WordEncoder())
    found = DenseRetriever([*passages, *CORPUS], WordEncoder()).retrieve("bridge", 10)
    assert {one.id for one in found} == {one.id for one in CORPUS}
