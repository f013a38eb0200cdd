"""An index as LangChain's vector store: its own suite, and what only this store promises."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains import RetrievalQA
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_rag_windows import WindowDocumentPrompt, create_windows_chain
from langchain_rag_windows.errors import RequestError
from langchain_rag_windows.retrievers import RagWindowsRetriever
from langchain_rag_windows.vectorstores import RagWindowsVectorStore
from rag_windows import PassageCache, RetrievalError, WindowedLM
from rag_windows.integration import keep_neighbours, passage_of
from rag_windows.passage import CHUNK_KEY, passages_of
from rag_windows_retrievers import Document as OurDocument
from rag_windows_retrievers import Index
from tests.integrations.cases import PLACES, case, one_window_each
from tests.integrations.langchain import asking
from tests.retrievers.small import WordEncoder


class Words(Embeddings):
    """Texts with the same words lie near to each other."""

    def __init__(self, name: str = "words") -> None:
        self._encoder = WordEncoder(name)
        self.model = name

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        made: list[list[float]] = self._encoder.embed(texts, query=False).tolist()
        return made

    def embed_query(self, text: str) -> list[float]:
        made: list[float] = self._encoder.embed([text], query=True)[0].tolist()
        return made


RANKINGS = ("meaning", "words", "hybrid")


class TestStandard(VectorStoreIntegrationTests):
    """LangChain's own tests of a vector store."""

    ranking: Any = None

    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> VectorStore:
        return RagWindowsVectorStore(tmp_path, self.get_embeddings(), ranking=self.ranking)


class TestStandardHybrid(TestStandard):
    """The same by words and by meaning."""

    ranking = "hybrid"


TEXTS = ["The bridge of Halden is old.", "A harbour lies behind the dunes.", "Bakers sell bread."]


def filled(folder: Path, embedding: Embeddings | None = None, **options: Any) -> Any:
    metadatas = [{"year": 1931, "tags": ["a", "b"]}, {"year": 1950}, {"year": 1931}]
    given = {"metadatas": metadatas, "ids": ["bridge", "harbour", "bread"], **options}
    return RagWindowsVectorStore.from_texts(TEXTS, embedding, index=folder, **given)


def names(documents: list[Document]) -> list[str | None]:
    return [one.id for one in documents]


ODD: list[dict[str, Any]] = [
    {},
    {"nested": {"list": [1, 2.5, None, {"deep": True}], "": ""}, "Ümläut 東京": "\u2028\x00 🦜"},
    {"id": 7, "title": "A title", "source": "notes/a b#1.md", "score": 0.25, "start_index": 0},
    {"title": 3, "source": 4, "document_id": None},
    {"half": "\ud800", "long": "x" * 100_000, "big": 2**80, "small": -1e-300},
    {CHUNK_KEY: json.dumps({"document": "d/1", "index": 3, "before": ["one", "two"]})},
    {CHUNK_KEY: json.dumps({"document": "d/1"}), "source": "d/1"},
    {CHUNK_KEY: {"document": "d/2", "index": 0}},
]
NAMES = ["a/b/../c", "#", "x#3", " ", "名前", "'; DROP TABLE passages; --", "a" * 500, "?k=v&é"]


@pytest.mark.parametrize("embedding", [None, Words()])
def test_ids_texts_and_metadata_come_back_as_they_were(
    tmp_path: Path, embedding: Embeddings | None
) -> None:
    given = [
        Document(f"word{i} \n\ttext {i}\r\n", id=name, metadata=metadata)
        for i, (name, metadata) in enumerate(zip(NAMES, ODD, strict=True))
    ]
    before = [one.model_copy(deep=True) for one in given]
    RagWindowsVectorStore(tmp_path, embedding).add_documents(given)
    assert given == before
    store = RagWindowsVectorStore(tmp_path, embedding)
    assert store.get_by_ids(NAMES) == given
    for i, one in enumerate(given):
        assert store.similarity_search(f"word{i} text", 1, ranking="words") == [one]
    assert store.get_by_ids([*NAMES[::-1], "unknown"]) == given[::-1]


def test_what_is_found_is_encoded_as_it_was_warmed(tmp_path: Path) -> None:
    parts = [
        Document(f"part {i} of the old bridge", metadata={"source": "a.md", "start_index": at})
        for i, at in enumerate((0, 24, 48))
    ]
    store = RagWindowsVectorStore(tmp_path, Words())
    store.add_documents(keep_neighbours(parts), ids=["0", "1", "2"])
    # Of these the store finds the neighbours itself.
    chunks = [{CHUNK_KEY: json.dumps({"document": "b", "index": i})} for i in range(3)]
    store.add_texts(["first tower", "second tower", "third tower"], chunks, ids=["3", "4", "5"])
    listed = {one.id: one for one in passages_of(store.as_retriever())}
    assert listed["2"].before == ("part 0 of the old bridge", "part 1 of the old bridge")
    assert listed["5"].before == ("first tower", "second tower")
    for query in ("old bridge", "tower"):
        found = store.similarity_search(query, 6)
        found += RagWindowsRetriever(retriever=store.index).invoke(query)
        for passage in map(passage_of, found):
            warmed = listed[passage.id]
            for name in ("text", "title", "document", "index", "before"):
                assert getattr(passage, name) == getattr(warmed, name)


def test_words_meaning_and_both(tmp_path: Path) -> None:
    store = filled(tmp_path / "words")
    assert store.embeddings is None
    ((found, score),) = store.similarity_search_with_score("the old bridge")
    assert (found.id, score > 0) == ("bridge", True)
    assert store.similarity_search("unknown") == []
    both = filled(tmp_path / "both", Words())
    for ranking in RANKINGS:
        assert both.similarity_search("old bridge", 1, ranking=ranking)[0].id == "bridge"
    cosines = {one.id: score for one, score in both.similarity_search_with_score(TEXTS[0], 3)}
    assert cosines["bridge"] == pytest.approx(1.0, abs=1e-5)
    vector = both.embeddings.embed_query(TEXTS[0])
    by_vector = both.similarity_search_with_score_by_vector(vector, 3)
    assert {one.id: score for one, score in by_vector} == pytest.approx(cosines, abs=1e-5)
    assert names(both.similarity_search_by_vector(vector, 1)) == ["bridge"]
    assert len(both.max_marginal_relevance_search("old bridge", 2)) == 2
    retriever = both.as_retriever(search_type="mmr", search_kwargs={"k": 1, "fetch_k": 3})
    assert names(retriever.invoke("old bridge")) == ["bridge"]
    near = {"score_threshold": 0.9, "k": 3}
    retriever = both.as_retriever(search_type="similarity_score_threshold", search_kwargs=near)
    assert names(retriever.invoke(TEXTS[0])) == ["bridge"]
    assert names(asyncio.run(retriever.ainvoke(TEXTS[0]))) == ["bridge"]


def test_the_length_of_vectors_counts_for_nothing(tmp_path: Path) -> None:
    class Long(Words):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            made = super().embed_documents(texts)
            return [
                [(1 + 9 * ("harbour" in t)) * x for x in v]
                for t, v in zip(texts, made, strict=True)
            ]

    assert filled(tmp_path, Long()).similarity_search("the old bridge of", 1)[0].id == "bridge"


def test_filters(tmp_path: Path) -> None:
    store = filled(tmp_path, Words())
    for ranking in RANKINGS:

        def found(filter: Any, ranking: str = ranking) -> set[str | None]:
            asked = "bridge harbour bread"
            return set(names(store.similarity_search(asked, 3, filter=filter, ranking=ranking)))

        assert found({"year": 1931}) == {"bridge", "bread"}
        assert found({"year": 1931, "tags": ["a", "b"]}) == {"bridge"}
        assert found({"year": "1931"}) == found({"none": None}) == set()
        assert found(lambda one: one.metadata["year"] > 1940) == {"harbour"}
        assert found(lambda one: one.id != "bridge") == {"harbour", "bread"}
    retriever = store.as_retriever(search_kwargs={"k": 1, "filter": {"year": 1950}})
    assert names(retriever.invoke("bridge")) == ["harbour"]
    # One that fits is found behind hundreds that don't.
    many = [f"the old bridge number {i}" for i in range(700)]
    store.add_texts(many, [{"year": 2000}] * len(many))
    for ranking in RANKINGS:
        last = store.similarity_search("old bridge", 1, filter={"year": 1931}, ranking=ranking)
        assert names(last) == ["bridge"]


def test_what_can_not_work_is_refused_by_name(tmp_path: Path) -> None:
    words, both = filled(tmp_path / "words"), filled(tmp_path / "both", Words())
    for call, said in (
        (lambda: words.similarity_search("x", ranking="meaning"), "needs embeddings"),
        (lambda: words.similarity_search_by_vector([1.0]), "has no embeddings"),
        (lambda: words.max_marginal_relevance_search("x"), "has no embeddings"),
        (lambda: words.similarity_search_with_relevance_scores("x"), "Only cosines have a range"),
        (lambda: both.similarity_search("x", ranking="best"), "ranking must be"),
        (lambda: both.similarity_search("x", where={}), r"no argument \['where'\]"),
        (lambda: both.similarity_search("x", filter={"year": {"$gt": 1}}), r"operator '\$gt'"),
        (lambda: both.similarity_search("x", filter={"$and": []}), r"operator '\$and'"),
        (lambda: both.similarity_search("x", filter="year"), "filter must be"),
        (lambda: both.similarity_search("x", 0), "k must be at least 1"),
        (lambda: both.similarity_search_by_vector([1.0]), "has 64 finite numbers"),
        (lambda: both.add_texts(["a", "b"], ids=["1"]), "2 documents came with 1 ids"),
        (lambda: both.add_texts(["a", "b"], [{}]), "2 texts came with 1 metadatas"),
        (lambda: both.add_texts(["a"], [{"k": object()}]), "can't be saved as JSON"),
        (lambda: both.add_texts(["a"], [{CHUNK_KEY: "x"}]), "neighbours in a document's metadata"),
        (lambda: both.add_documents([], namespace="x"), "no argument"),
        (lambda: both.delete(["bridge"], namespace="x"), "no argument"),
        (lambda: RagWindowsVectorStore(both.index, Words()), "has its own model"),
        (lambda: RagWindowsVectorStore.from_texts(["a"], Words()), "needs a folder"),
        (lambda: RagWindowsVectorStore(tmp_path, cache=3), "cache must be a PassageCache"),  # type: ignore[arg-type]  # it is what is refused
    ):
        with pytest.raises(RequestError, match=said):
            call()
    with pytest.raises(RetrievalError, match="were made by 'Words"):
        RagWindowsVectorStore(tmp_path / "both", Words("others"))
    assert names(both.get_by_ids(["bridge", "harbour", "bread"])) == ["bridge", "harbour", "bread"]


def test_an_index_that_is_open_brings_its_model_and_its_files(tmp_path: Path) -> None:
    ours = Index(tmp_path, WordEncoder())
    ours.add(OurDocument("The tower of Arava is tall.", id="tower.md", title="Towers"))
    store = RagWindowsVectorStore(ours)
    assert store.embeddings is not None
    store.add_texts(["The bridge of Arava is low."], ids=["bridge"])
    (found,) = store.similarity_search("tall tower", 1)
    assert found.metadata["title"] == "Towers"
    assert passage_of(found).document == "tower.md"
    near = store.embeddings.embed_query("bridge low")
    assert names(store.similarity_search_by_vector(near, 1)) == ["bridge"]
    assert store.embeddings.embed_documents(["bridge low"]) == [near]
    store.delete()
    assert store.similarity_search("Arava") == []
    assert len(ours) == 0


OTHER = """
import sys
from langchain_rag_windows.vectorstores import RagWindowsVectorStore
store = RagWindowsVectorStore(sys.argv[1])
print([one.id for one in store.similarity_search("old bridge")])
store.delete(["bridge"])
store.add_texts(["The old bridge is new."], [{"by": "another"}], ids=["new"])
"""


@pytest.mark.slow
def test_another_process_sees_and_changes_it(tmp_path: Path) -> None:
    lm = WindowedLM.from_pretrained("tiny-reader", cache=PassageCache("64MB"))
    store = filled(tmp_path, cache=lm)
    found = store.similarity_search("old bridge")
    lm.generate("Who?", [passage_of(one) for one in found], max_new_tokens=1)
    done = subprocess.run(
        [sys.executable, "-c", OTHER, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['bridge']"
    (found,) = store.similarity_search("old bridge")
    assert (found.id, found.metadata) == ("new", {"by": "another"})
    # The search learned of it, and removed the windows.
    assert lm.cache is not None
    assert lm.cache.invalidate(["bridge"]) == 0


def test_langchains_indexing_keeps_it_up_to_date(tmp_path: Path) -> None:
    manager = InMemoryRecordManager("notes")
    manager.create_schema()
    store = RagWindowsVectorStore(tmp_path, Words())

    def indexed(*texts: str) -> dict[str, Any]:
        documents = [Document(text, metadata={"source": text.split()[0]}) for text in texts]
        options: Any = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
        return {**index(documents, manager, store, **options)}

    assert indexed("a one", "b two")["num_added"] == 2
    assert indexed("a one", "b two")["num_skipped"] == 2
    changed = indexed("a three")
    assert (changed["num_added"], changed["num_deleted"]) == (1, 2)
    assert [one.page_content for one in store.similarity_search("a b one two three")] == ["a three"]


def windows(lm: WindowedLM, *ids: str) -> list[bool]:
    """Whether the cache has any window of each id; it has none afterwards."""
    assert lm.cache is not None
    return [lm.cache.invalidate([one]) > 0 for one in ids]


@pytest.mark.parametrize("way", ["delete", "replace", "all", "async"])
def test_windows_of_what_is_gone_leave_the_cache(tmp_path: Path, way: str) -> None:
    cache = PassageCache("64MB", "64MB", tmp_path / "windows")
    lm = WindowedLM.from_pretrained("tiny-reader", cache=cache)
    store = filled(tmp_path / "index", cache=cache if way == "replace" else lm)
    lm.generate("Who?", passages_of(store), max_new_tokens=1)
    cache.flush()
    assert cache.stats().tiers["disk"].entries
    if way == "replace":
        store.add_texts(["The bridge is new."], ids=["bridge"])
    elif way == "async":
        asyncio.run(store.adelete(["bridge"]))
    else:
        store.delete(None if way == "all" else ["bridge"])
    kept = way != "all"
    assert windows(lm, "bridge", "harbour", "bread") == [False, kept, kept]


def test_windows_that_have_seen_a_deleted_neighbour_go_with_it(tmp_path: Path) -> None:
    lm = WindowedLM.from_pretrained("tiny-reader", cache=PassageCache("64MB"), method="neighbours")
    store = RagWindowsVectorStore(tmp_path, cache=lm)
    chunks = [{CHUNK_KEY: json.dumps({"document": "d", "index": i})} for i in range(2)]
    store.add_texts(["A secret tower.", "A bridge."], chunks, ids=["tower", "bridge"])
    store.add_texts(["A harbour."], ids=["harbour"])
    lm.generate("Who?", passages_of(store), max_new_tokens=1)
    store.delete(["tower"])
    assert [one.before for one in store.index.named(["bridge"])] == [()]
    assert windows(lm, "bridge", "harbour") == [False, True]


def test_an_edited_document_changes_the_answer(tmp_path: Path) -> None:
    one, told = case(PLACES[1]), asking.Told()
    lm = WindowedLM.from_pretrained("tiny-reader", cache=PassageCache("256MB"))
    right = one.passages[one.place]
    wrong = right.text.replace(one.answer, "Norwood")
    assert wrong != right.text
    store = RagWindowsVectorStore(tmp_path, cache=lm)
    documents = asking.documents_of(one)
    documents[one.place].page_content = wrong
    store.add_documents(documents)
    retriever = store.as_retriever(search_kwargs={"k": len(documents)})
    llm = asking.chat(lm=lm, callbacks=[told])
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
    chain = create_retrieval_chain(retriever, create_windows_chain(llm, prompt))
    stock = RetrievalQA.from_chain_type(
        llm,
        retriever=retriever,
        chain_type_kwargs={
            "prompt": PromptTemplate.from_template("{context}\n\n{question}"),
            "document_prompt": WindowDocumentPrompt("title"),
        },
    )

    def answers() -> list[str]:
        made = chain.invoke({"input": one.question})
        texts = [found.page_content for found in made["context"]]
        assert one_window_each(told.answers[-1]["windows"], texts)
        return [made["answer"], stock.invoke({"query": one.question})["result"]]

    assert one.answer not in answers()
    store.add_documents([asking.documents_of(one)[one.place]])
    assert answers() == [one.answer, one.answer]
    store.delete([str(right.id)])
    assert one.answer not in answers()
