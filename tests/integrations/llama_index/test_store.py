"""An index as LlamaIndex's vector store, by itself and below a VectorStoreIndex."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import (
    Document,
    MockEmbedding,
    StorageContext,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    IndexNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from llama_index.retrievers.rag_windows import RagWindowsRetriever, RagWindowsVectorStore
from rag_windows import InputError, PassageCache, WindowedLM
from rag_windows.integration import keep_neighbours, passage_of
from rag_windows.passage import CHUNK_KEY, passages_of
from rag_windows_retrievers import Document as OurDocument
from rag_windows_retrievers import Index
from tests.retrievers.small import WordEncoder

MODE = VectorStoreQueryMode
ENCODER = WordEncoder()


class Words(BaseEmbedding):
    """Texts with the same words lie near to each other."""

    def _get_text_embedding(self, text: str) -> list[float]:
        made: list[float] = ENCODER.embed([text], query=False)[0].tolist()
        return made

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


WORDS = Words()
TEXTS = ["The bridge of Halden is old.", "A harbour lies behind the dunes.", "Bakers sell bread."]
METADATA: list[dict[str, Any]] = [
    {"year": 1931, "tags": ["old", "stone"], "by": "Ada"},
    {"year": 1950.5, "tags": [], "by": "bob"},
    {"year": "1931", "none": None},
]
IDS = ["bridge", "harbour", "bread"]


def node(text: str, id: str, metadata: dict[str, Any] | None = None, source: str = "") -> TextNode:
    links = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=source)} if source else {}
    made = TextNode(text=text, id_=id, metadata=metadata or {}, relationships=links)
    made.embedding = WORDS.get_text_embedding(text)
    return made


def filled(folder: Path, **options: Any) -> RagWindowsVectorStore:
    store = RagWindowsVectorStore(folder, **options)
    nodes = [node(*one, source=f"of {one[1]}") for one in zip(TEXTS, IDS, METADATA, strict=True)]
    assert store.add(nodes) == IDS
    return store


def asked(text: str, k: int = 3, mode: VectorStoreQueryMode = MODE.DEFAULT, **options: Any) -> Any:
    return VectorStoreQuery(
        WORDS.get_query_embedding(text), similarity_top_k=k, query_str=text, mode=mode, **options
    )


def same(one: BaseNode, other: BaseNode) -> bool:
    return one.model_dump(exclude={"embedding"}) == other.model_dump(exclude={"embedding"})


ODD: list[dict[str, Any]] = [
    {},
    {"nested": {"list": [1, 2.5, None, {"deep": True}], "": ""}, "Ümläut 東京": "\u2028\x00 🦜"},
    {"id": 7, "title": "A title", "source": "notes/a b#1.md", "score": 0.25},
    {"title": 3, "source": 4, "document_id": None, "long": "x" * 100_000, "big": 2**80},
    {CHUNK_KEY: '{"document": "d/1", "index": 3, "before": ["one", "two"]}'},
]
NAMES = ["a/b/../c", "#", "x#3", "名前", "'; DROP TABLE passages; --"]


def test_nodes_come_back_as_they_were(tmp_path: Path) -> None:
    given: list[BaseNode] = []
    for i, (name, metadata) in enumerate(zip(NAMES, ODD, strict=True)):
        one = node(f"word{i} text\r\n\t", name, metadata, source=f"document/{i}")
        one.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(
            node_id="next", metadata={"k": 1}, hash="h"
        )
        one.excluded_llm_metadata_keys, one.text_template = ["long", "nested"], "{content}|"
        one.start_char_idx, one.end_char_idx = 3, 30
        given.append(one)
    given.append(
        ImageNode(text="picture", id_="image", image_url="https://x/y.png", embedding=[1.0] * 64)
    )
    given.append(IndexNode(text="table", id_="index", index_id="t", embedding=[0.5] * 64))
    names = [one.node_id for one in given]
    before = [one.model_copy(deep=True) for one in given]
    RagWindowsVectorStore(tmp_path).add(given)
    assert all(map(same, given, before))
    store = RagWindowsVectorStore(tmp_path)
    for found in (
        store.get_nodes(names),
        asyncio.run(store.aget_nodes()),
        [
            (store.query(asked("word text picture table", 1, node_ids=[name])).nodes or [])[0]
            for name in names
        ],
    ):
        assert [type(one) for one in found] == [type(one) for one in given]
        assert all(map(same, found, given))
    assert store.get_nodes(["unknown"]) == []
    listed = {one.id: one for one in store.passages}
    assert listed == {each.node_id: passage_of(each) for each in given}


@pytest.mark.parametrize("mode", [MODE.DEFAULT, MODE.TEXT_SEARCH, MODE.SPARSE, MODE.HYBRID])
def test_modes(tmp_path: Path, mode: VectorStoreQueryMode) -> None:
    store = filled(tmp_path)
    for result in (
        store.query(asked("the old bridge", 2, mode)),
        asyncio.run(store.aquery(asked("the old bridge", 2, mode))),
    ):
        assert result.ids is not None
        assert result.nodes is not None
        assert result.similarities is not None
        assert result.ids[0] == "bridge"
        assert result.ids == [one.node_id for one in result.nodes]
        assert result.similarities == sorted(result.similarities, reverse=True)
        assert len(result.ids) == (1 if mode in (MODE.TEXT_SEARCH, MODE.SPARSE) else 2)
    if mode == MODE.DEFAULT:
        score = WORDS.similarity(
            WORDS.get_text_embedding(TEXTS[0]), WORDS.get_query_embedding("the old bridge")
        )
        assert (result.similarities or [0])[0] == pytest.approx(score, abs=1e-5)


def test_weights_of_a_hybrid_query(tmp_path: Path) -> None:
    store = filled(tmp_path)

    def ids(**options: Any) -> list[str]:
        query = asked("harbour", 3, MODE.HYBRID, **options)
        query.query_embedding = WORDS.get_query_embedding("bridge")
        return store.query(query).ids or []

    assert ids(alpha=0.0) == ["harbour"]
    assert ids(alpha=1.0)[0] == "bridge"
    assert ids(alpha=0.1)[0] == "harbour"
    assert ids(alpha=0.99)[0] == "bridge"
    assert len(ids(hybrid_top_k=2)) == 2
    assert len(ids(sparse_top_k=1)) == 3
    with pytest.raises(InputError, match="alpha must be from 0"):
        ids(alpha=2.0)


OPERATOR = FilterOperator
FITTING: list[tuple[str, FilterOperator, Any, set[str]]] = [
    ("year", OPERATOR.EQ, 1931, {"bridge"}),
    ("year", OPERATOR.NE, 1931, {"harbour", "bread"}),
    ("year", OPERATOR.GT, 1931, {"harbour"}),
    ("year", OPERATOR.GTE, 1931, {"bridge", "harbour"}),
    ("year", OPERATOR.LT, 1950.5, {"bridge"}),
    ("year", OPERATOR.LTE, "1931", {"bread"}),
    ("year", OPERATOR.IN, ["1931", "2"], {"bread"}),
    ("by", OPERATOR.NIN, ["Ada"], {"harbour", "bread"}),
    ("tags", OPERATOR.ANY, ["stone", "wood"], {"bridge"}),
    ("tags", OPERATOR.ALL, ["stone", "wood"], set()),
    ("tags", OPERATOR.ALL, ["stone", "old"], {"bridge"}),
    ("tags", OPERATOR.CONTAINS, "old", {"bridge"}),
    ("by", OPERATOR.TEXT_MATCH, "d", {"bridge"}),
    ("by", OPERATOR.TEXT_MATCH, "B", set()),
    ("by", OPERATOR.TEXT_MATCH_INSENSITIVE, "B", {"harbour"}),
    ("tags", OPERATOR.IS_EMPTY, None, {"harbour", "bread"}),
    ("none", OPERATOR.IS_EMPTY, None, set(IDS)),
    ("ref_doc_id", OPERATOR.EQ, "of bread", {"bread"}),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> RagWindowsVectorStore:
    return filled(tmp_path_factory.mktemp("index"))


@pytest.mark.parametrize(("key", "operator", "value", "expected"), FITTING)
def test_operators(
    shared: RagWindowsVectorStore,
    key: str,
    operator: FilterOperator,
    value: Any,
    expected: set[str],
) -> None:
    filters = MetadataFilters(filters=[MetadataFilter(key=key, operator=operator, value=value)])
    for mode in (MODE.DEFAULT, MODE.TEXT_SEARCH, MODE.HYBRID):
        found = shared.query(asked("bridge harbour bread", 3, mode, filters=filters)).ids
        assert set(found or ()) == expected
    assert {one.node_id for one in shared.get_nodes(filters=filters)} == expected
    inverse = MetadataFilters(filters=[filters], condition=FilterCondition.NOT)
    assert {one.node_id for one in shared.get_nodes(filters=inverse)} == set(IDS) - expected


def test_all_operators_are_tested() -> None:
    assert {operator for _, operator, _, _ in FITTING} == set(FilterOperator)


def test_conditions_and_what_else_a_query_restricts(shared: RagWindowsVectorStore) -> None:
    ada, late = (
        MetadataFilter(key="by", value="Ada"),
        MetadataFilter(key="year", operator=OPERATOR.GT, value=1940),
    )

    def fitting(condition: FilterCondition, *filters: Any) -> set[str]:
        made = MetadataFilters(filters=list(filters), condition=condition)
        return {one.node_id for one in shared.get_nodes(filters=made)}

    assert fitting(FilterCondition.AND, ada, late) == set()
    assert fitting(FilterCondition.OR, ada, late) == {"bridge", "harbour"}
    assert fitting(FilterCondition.NOT, ada, late) == {"bread"}
    either = MetadataFilters(filters=[ada, late], condition=FilterCondition.OR)
    assert fitting(FilterCondition.AND, either, ada) == {"bridge"}
    assert fitting(FilterCondition.AND) == set(IDS)
    found = shared.query(asked("bridge", 3, doc_ids=["of bread", "of nobody"])).ids
    assert found == ["bread"]
    assert shared.query(asked("bridge", 3, node_ids=["harbour"])).ids == ["harbour"]
    assert len(shared.query(asked("bridge", 3, node_ids=[], doc_ids=[])).ids or ()) == 3
    named = {one.node_id for one in shared.get_nodes(["bridge", "bread"], either)}
    assert named == {"bridge"}


def test_what_can_not_work_is_refused_by_name(tmp_path: Path) -> None:
    store = filled(tmp_path)

    def by(operator: FilterOperator, value: Any) -> VectorStoreQuery:
        return asked(
            "x",
            filters=MetadataFilters(
                filters=[MetadataFilter(key="k", operator=operator, value=value)]
            ),
        )

    bare, short, odd = node("a", "a"), node("b", "b"), node("c", "c", {"k": object()})
    bare.embedding, short.embedding = None, [1.0, 2.0]
    for call, said in (
        (lambda: store.query(asked("x", mode=MODE.MMR)), "query mode 'mmr' is not served"),
        (lambda: store.query(asked("x", mode=MODE.SVM)), "query mode 'svm' is not served"),
        (lambda: store.query(asked("x"), probes=3), r"no argument \['probes'\]"),
        (lambda: store.query(asked("x", 0)), "k must be at least 1"),
        (lambda: store.query(VectorStoreQuery(query_str="x")), "needs query_embedding"),
        (lambda: store.query(VectorStoreQuery([1.0], mode=MODE.TEXT_SEARCH)), "needs query_str"),
        (lambda: store.query(VectorStoreQuery([1.0])), "has 64 finite numbers"),
        (lambda: store.query(by(OPERATOR.IN, "a")), "filter 'in' of 'k' needs a list"),
        (
            lambda: store.query(by(OPERATOR.TEXT_MATCH, 3)),
            "filter 'text_match' of 'k' needs a text",
        ),
        (lambda: store.add([bare]), "'a' has no embedding"),
        (lambda: store.add([short]), "have 64 numbers, not 2"),
        (lambda: store.add([short, node("d", "d")]), "differ in shape"),
        (lambda: store.add([odd]), "JSON"),
        (lambda: store.delete_nodes(), "needs node_ids or filters"),
        (lambda: store.delete("x", force=True), "no argument"),
        (lambda: RagWindowsVectorStore(tmp_path, cache=True), "cache must be a PassageCache"),  # type: ignore[arg-type]  # it is what is refused
        (
            lambda: RagWindowsVectorStore(Index(tmp_path / "m", ENCODER), words_only=True),
            "finds by",
        ),
    ):
        with pytest.raises(InputError, match=said):
            call()
    assert [one.node_id for one in store.get_nodes()] == IDS


def test_deleting(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.add([node("More of the bridge.", "more", source="of bridge")])
    store.delete("of bridge")
    store.delete("of nobody")
    assert [one.node_id for one in store.get_nodes()] == ["harbour", "bread"]
    store.delete_nodes(["harbour", "unknown"])
    by = MetadataFilters(filters=[MetadataFilter(key="year", value="1931")])
    store.delete_nodes(["unknown"], by)
    assert [one.node_id for one in store.get_nodes()] == ["bread"]
    asyncio.run(store.adelete_nodes(filters=by))
    assert store.query(asked("bread")).ids == []
    # Nothing is left of the old model's vectors either.
    store.add([TextNode(text="short", id_="s", embedding=[1.0, 0.0])])
    (cosine,) = store.query(VectorStoreQuery([1.0, 1.0])).similarities or [0.0]
    assert cosine == pytest.approx(0.5**0.5)
    asyncio.run(store.aclear())
    assert store.get_nodes() == []
    asyncio.run(store.async_add([node("new", "new")]))
    asyncio.run(store.adelete("new"))
    assert store.get_nodes() == []


LONG = " ".join(f"Sentence {i} is about the part number {i} of the bridge." for i in range(12))


def index_over(store: RagWindowsVectorStore, embed_model: Any = WORDS) -> VectorStoreIndex:
    split = SentenceSplitter(chunk_size=40, chunk_overlap=0)
    return VectorStoreIndex.from_vector_store(
        store, embed_model=embed_model, transformations=[split]
    )


def test_a_document_comes_changes_and_goes(tmp_path: Path) -> None:
    index = index_over(RagWindowsVectorStore(tmp_path))
    index.insert(Document(text=LONG, doc_id="long", metadata={"title": "Bridges"}))
    index.insert(Document(text="The tower is tall.", doc_id="tower"))
    retriever = index.as_retriever(similarity_top_k=50)
    found = retriever.retrieve("part number 7 of the bridge")
    assert {one.node.ref_doc_id for one in found} == {"long", "tower"}
    assert "number 7 " in found[0].text
    again = index_over(RagWindowsVectorStore(tmp_path))
    assert [one.node_id for one in again.as_retriever(similarity_top_k=50).retrieve("bridge")] == [
        one.node_id for one in retriever.retrieve("bridge")
    ]
    again.delete_ref_doc("long")
    assert [one.text for one in retriever.retrieve("bridge")] == ["The tower is tall."]
    again.update_ref_doc(Document(text="The tower is low.", doc_id="tower"))
    assert [one.text for one in retriever.retrieve("tower")] == ["The tower is low."]


def test_the_nodes_in_front_are_found_and_encoded_as_they_were_warmed(tmp_path: Path) -> None:
    store = RagWindowsVectorStore(tmp_path)
    index = index_over(store)
    index._insert_batch_size = 2  # so that a document comes in several additions
    index.insert(Document(text=LONG, doc_id="long", metadata={"title": "Bridges"}))
    retriever = index.as_retriever(similarity_top_k=50)
    nodes = {one.node_id: one for one in retriever.retrieve("bridge")}
    assert len(nodes) >= 4
    listed = {one.id: one for one in passages_of(retriever)}
    assert listed.keys() == nodes.keys()
    assert max(len(one.before) for one in listed.values()) >= 3
    for name, found in nodes.items():
        passage, warmed = passage_of(found), listed[name]
        assert passage.before == warmed.before
        assert (passage.text, passage.title, passage.document) == (
            *(warmed.text, warmed.title),
            "long",
        )
        previous = found.node.prev_node
        if previous is not None:
            assert passage.before[-1] == passage_of(nodes[previous.node_id]).text
            assert CHUNK_KEY not in found.node.get_content(metadata_mode=MetadataMode.LLM)
            assert CHUNK_KEY not in found.node.get_content(metadata_mode=MetadataMode.EMBED)
        else:
            assert passage.before == ()
    # What is kept is what was given.
    assert not any(CHUNK_KEY in one.metadata for one in store.get_nodes())
    first = next(one for one in nodes.values() if one.node.prev_node is None)
    store.delete_nodes([first.node_id])
    texts = [text for one in retriever.retrieve("bridge") for text in passage_of(one).before]
    assert passage_of(first).text not in texts


def test_neighbours_that_were_kept_stay(tmp_path: Path) -> None:
    parts = [node(f"part {i} of the bridge", str(i), source="d") for i in range(3)]
    for before, one in itertools.pairwise(parts):
        one.relationships[NodeRelationship.PREVIOUS] = before.as_related_node_info()
    kept = keep_neighbours(parts)
    store = RagWindowsVectorStore(tmp_path)
    store.add(kept)
    found = store.query(asked("part bridge")).nodes or []
    assert {one.node_id: passage_of(one) for one in found} == {
        one.node_id: passage_of(one) for one in kept
    }
    assert {one.id: one.index for one in store.client.retrieve("bridge")} == {
        "0": 0,
        "1": 1,
        "2": 2,
    }


def test_only_documents_that_changed_are_embedded_again(tmp_path: Path) -> None:
    store = RagWindowsVectorStore(tmp_path / "index")
    context = StorageContext.from_defaults(vector_store=store)
    documents = [Document(text=text, doc_id=name) for text, name in zip(TEXTS, IDS, strict=True)]
    index = VectorStoreIndex.from_documents(documents, context, embed_model=WORDS)
    index.set_index_id("notes")
    context.persist(str(tmp_path / "storage"))
    store = RagWindowsVectorStore(tmp_path / "index")
    context = StorageContext.from_defaults(
        persist_dir=str(tmp_path / "storage"), vector_store=store
    )
    loaded = load_index_from_storage(context, "notes", embed_model=WORDS)
    documents[0] = Document(text="The bridge of Halden is new.", doc_id="bridge")
    documents.append(Document(text="A well.", doc_id="well"))
    before = {one.ref_doc_id: one.node_id for one in store.get_nodes()}
    assert loaded.refresh_ref_docs(documents) == [True, False, False, True]
    assert loaded.refresh_ref_docs(documents) == [False] * 4
    after = {one.ref_doc_id: one.node_id for one in store.get_nodes()}
    assert after.keys() == {*IDS, "well"}
    assert {name for name in IDS if before[name] == after[name]} == {"harbour", "bread"}
    (found,) = loaded.as_retriever(similarity_top_k=1).retrieve("bridge of Halden")
    assert found.text == "The bridge of Halden is new."
    loaded.delete_ref_doc("bridge", delete_from_docstore=True)
    assert [one for one in store.get_nodes() if one.ref_doc_id == "bridge"] == []


def test_a_pipeline_keeps_it_up_to_date(tmp_path: Path) -> None:
    store = RagWindowsVectorStore(tmp_path)
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), WORDS],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    pipeline.run(documents=[Document(text="one", doc_id="a"), Document(text="two", doc_id="b")])
    pipeline.run(documents=[Document(text="three", doc_id="a")])
    assert [one.get_content() for one in store.get_nodes()] == ["three"]


def test_words_alone_and_an_index_with_its_own_model(tmp_path: Path) -> None:
    nothing = MockEmbedding(embed_dim=1)
    words = index_over(RagWindowsVectorStore(tmp_path / "words", words_only=True), nothing)
    words.insert(Document(text=TEXTS[0], doc_id="bridge"))
    assert len(words.as_retriever().retrieve("old bridge")) == 1
    assert words.as_retriever(vector_store_query_mode="hybrid").retrieve("tower") == []
    ours = Index(tmp_path / "own", WordEncoder())
    ours.add(OurDocument("The tower of Arava is tall.", id="tower.md", title="Towers"))
    own = index_over(RagWindowsVectorStore(ours), nothing)
    own.insert(Document(text=TEXTS[0], doc_id="bridge"))
    for mode in ("default", "hybrid", "text_search"):
        retriever = own.as_retriever(vector_store_query_mode=mode, similarity_top_k=1)
        assert [one.node.ref_doc_id for one in retriever.retrieve("tall tower")] == ["tower.md"]
        (found,) = retriever.retrieve("old bridge")
        assert found.node.ref_doc_id == "bridge"
    (tower,) = (one for one in own.vector_store.get_nodes() if one.ref_doc_id == "tower.md")
    assert passage_of(tower).title == "Towers"
    own.delete_ref_doc("tower.md")
    assert [one.id for one in ours.documents()] == ["bridge"]
    # Any retriever adapter takes an index, too.
    (found,) = RagWindowsRetriever(ours, similarity_top_k=1).retrieve("old bridge")
    (stored,) = own.as_retriever(similarity_top_k=1).retrieve("old bridge")
    assert passage_of(found).text == passage_of(stored).text
    assert found.node.ref_doc_id == stored.node.ref_doc_id


def windows(lm: WindowedLM, *ids: str) -> list[bool]:
    """Whether the cache has any window of each id; it has none afterwards."""
    assert lm.cache is not None
    return [lm.cache.invalidate([one]) > 0 for one in ids]


@pytest.mark.parametrize("way", ["delete", "delete_nodes", "replace", "clear"])
def test_windows_of_what_is_gone_leave_the_cache(tmp_path: Path, way: str) -> None:
    lm = WindowedLM.from_pretrained("tiny-reader", cache=PassageCache("64MB"))
    store = filled(tmp_path, cache=lm)
    lm.generate("Who?", store.passages, max_new_tokens=1)
    if way == "delete":
        store.delete("of bridge")
    elif way == "delete_nodes":
        store.delete_nodes(["bridge"])
    elif way == "replace":
        store.add([node("Another.", "bridge", source="another")])
    else:
        store.clear()
    kept = way != "clear"
    assert windows(lm, "bridge", "harbour", "bread") == [False, kept, kept]
