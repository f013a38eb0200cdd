from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rag_windows import InputError, Passage, RetrievalError
from rag_windows_retrievers import DenseRetriever
from tests.retrievers.small import CORPUS, WordEncoder, ranking


def test_scores_are_cosines() -> None:
    encoder = WordEncoder()
    hits = DenseRetriever(CORPUS, encoder).retrieve("The bridge of Halden", 2)
    assert [one.id for one in hits] == ["bridge", "arches"]
    texts = [f"{one.title or ''} {one.text}" for one in CORPUS]
    vectors = encoder.embed(["The bridge of Halden", texts[0]], query=True)
    assert hits[0].score == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-6)


def test_titles_are_searched() -> None:
    assert DenseRetriever(CORPUS, WordEncoder()).retrieve("Old town", 1)[0].id == "bread"


def test_a_long_passage_is_found_by_any_part_of_it() -> None:
    filler = "plain words that say nothing " * 20
    long = Passage(filler + "the lighthouse keeper's daughter " + filler, id="long", title="T")
    retriever = DenseRetriever([*CORPUS, long], WordEncoder(longest=10))
    assert retriever.retrieve("lighthouse keeper's daughter", 1)[0].id == "long"
    assert [one.id for one in retriever.retrieve("plain words", 100)].count("long") == 1


def test_a_long_query_asks_with_all_its_parts() -> None:
    retriever = DenseRetriever(CORPUS, WordEncoder(longest=6))
    query = "Bakers sell bread in the morning. " * 3 + "The old bridge has five arches"
    assert {one.id for one in retriever.retrieve(query, 2)} == {"bread", "arches"}


def test_a_query_of_paragraphs_asks_with_their_mean() -> None:
    encoder = WordEncoder()
    retriever = DenseRetriever(CORPUS, encoder)
    (hit,) = retriever.retrieve("lakes\n\nbridge\n \nbridge", 1)
    one, two, passage = encoder.embed(["lakes", "bridge", f" {hit.text}"], query=True)
    assert hit.score == pytest.approx(float((one + 2 * two) @ passage) / 3, abs=1e-6)


def test_blank_passages_are_never_found() -> None:
    retriever = DenseRetriever([Passage("  ", id="blank"), *CORPUS], WordEncoder())
    found = [one.id for one in retriever.retrieve("bridge", 10)]
    assert sorted(map(str, found)) == sorted(str(one.id) for one in CORPUS)
    with pytest.raises(RetrievalError, match="no text to search"):
        DenseRetriever([Passage(" ")], WordEncoder())
    with pytest.raises(RetrievalError, match="no text to search"):
        DenseRetriever([], WordEncoder())


def test_equal_passages_are_embedded_once() -> None:
    encoder = WordEncoder()
    retriever = DenseRetriever([*CORPUS, *CORPUS], encoder)
    assert len(encoder.asked) == retriever.embedded == len(CORPUS)


def test_an_update_embeds_only_what_is_new() -> None:
    encoder = WordEncoder()
    first = DenseRetriever(CORPUS, encoder)
    encoder.asked.clear()
    changed = dataclasses.replace(CORPUS[1], title="Port")
    renamed = dataclasses.replace(CORPUS[2], id="water", metadata={"a": 1})
    told: list[tuple[int, int]] = []
    second = first.updated(
        [Passage("A new mill.", "mill"), changed, renamed, CORPUS[0]],
        progress=lambda done, total: told.append((done, total)),
    )
    assert len(encoder.asked) == second.embedded == 2
    assert told[-1] == (2, 2)
    fresh = DenseRetriever(second.passages, WordEncoder())
    for query in ("bridge", "Port", "lakes", "bread"):
        expected = [(one.id, one.score) for one in fresh.retrieve(query)]
        assert ranking(second.retrieve(query)) == expected
    assert second.retrieve("lakes", 1)[0].metadata == {"a": 1}
    assert first.retrieve("bread", 1)[0].id == "bread"


def test_what_is_loaded_ranks_alike_and_embeds_nothing(tmp_path: Path) -> None:
    built = DenseRetriever([*CORPUS, Passage("")], WordEncoder(longest=3))
    built.save(tmp_path)
    encoder = WordEncoder("words", longest=3)
    loaded = DenseRetriever.load(tmp_path, encoder)
    assert len(encoder.asked) == 3  # the probe
    assert loaded.passages == built.passages
    assert loaded.embedded == 0
    assert loaded.retrieve("old bridge") == built.retrieve("old bridge")
    assert loaded.updated(CORPUS).embedded == 0


def revised(name: str, revision: str | None) -> WordEncoder:
    encoder = WordEncoder(name)
    encoder.revision = revision
    return encoder


@pytest.mark.parametrize(
    ("encoder", "told"),
    [
        (WordEncoder("others"), "'others'"),
        (WordEncoder(dimension=32), "dimension 32"),
        (revised("words", "b1"), "revision b1"),
    ],
)
def test_another_models_vectors_are_refused(
    tmp_path: Path, encoder: WordEncoder, told: str
) -> None:
    DenseRetriever(CORPUS, revised("words", "a0")).save(tmp_path)
    with pytest.raises(RetrievalError, match=rf"made by 'words' \(revision a0.*{told}.*anew"):
        DenseRetriever.load(tmp_path, encoder)


def test_a_moved_model_is_the_same_model(tmp_path: Path) -> None:
    DenseRetriever(CORPUS, WordEncoder()).save(tmp_path)
    moved = WordEncoder()
    moved.name = "/elsewhere/words"
    assert DenseRetriever.load(tmp_path, moved).retrieve("bridge")


def test_what_is_no_model_is_told() -> None:
    with pytest.raises(InputError, match=r"model must be a name, .* not int"):
        DenseRetriever(CORPUS, 3)  # type: ignore[arg-type]  # a wrong type is what is tested
