"""What comes back: text, counts, metadata, content blocks, whole and as a stream."""

from __future__ import annotations

import functools
import operator
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk

from langchain_rag_windows import ChatRagWindows, RagWindows
from tests.integrations.langchain.drawn import answered, reader

BORN = "Where was Alra Ashden born?"
DOCUMENT = Document(
    page_content="Alra Ashden was born in Arava.",
    metadata={"title": "Alra Ashden", "source": "https://example.org/alra"},
    id="alra",
)
OTHER = Document(page_content="Belra Dorby was born in Velum.", metadata={"title": "Belra Dorby"})


def chat(**arguments: Any) -> ChatRagWindows:
    return ChatRagWindows(lm=reader(), **{"max_tokens": 16, **arguments})


def merged(model: ChatRagWindows, **options: Any) -> AIMessageChunk:
    made: AIMessageChunk = functools.reduce(operator.add, model.stream(BORN, **options))
    return made


def steady(message: AIMessage) -> dict[str, Any]:
    return {k: v for k, v in message.response_metadata.items() if k != "timings"}


def test_what_is_told_of_an_answer() -> None:
    answer = chat(method="pcw").invoke(BORN, documents=[OTHER, DOCUMENT])
    metadata = answer.response_metadata
    assert answer.content == "Arava"
    assert metadata["method"] == {"name": "pcw"}
    assert metadata["finish_reason"] == "stop"
    assert metadata["model_provider"] == "rag_windows"
    assert metadata["timings"].keys() == {"encode_s", "ttft_s", "total_s"}
    other, alra = metadata["citations"]
    assert (alra["index"], alra["id"], alra["cited"]) == (1, "alra", True)
    assert (other["id"], other["cited"]) == (None, False)
    assert alra["mass"] > other["mass"] > 0
    usage = answer.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"] == {"cache_read": 0}


def test_content_blocks_cite_the_document_that_carried_the_answer() -> None:
    answer = chat().invoke(BORN, documents=[OTHER, DOCUMENT])
    mass = answer.response_metadata["citations"][1]["mass"]
    citation = {
        "type": "citation",
        "start_index": 0,
        "end_index": 5,
        "cited_text": DOCUMENT.page_content,
        "title": "Alra Ashden",
        "url": "https://example.org/alra",
        "extras": {"index": 1, "id": "alra", "metadata": DOCUMENT.metadata, "mass": mass},
    }
    expected = [{"type": "text", "text": "Arava", "annotations": [citation]}]
    assert answer.content_blocks == expected
    assert merged(chat(), documents=[OTHER, DOCUMENT]).content_blocks == expected
    v1 = chat(output_version="v1").invoke(BORN, documents=[OTHER, DOCUMENT])
    assert v1.content == expected
    (block,) = merged(chat(output_version="v1"), documents=[OTHER, DOCUMENT]).content_blocks
    assert {key: value for key, value in block.items() if key != "index"} == expected[0]


def test_a_stream_tells_once_what_a_whole_answer_tells() -> None:
    drawn = answered(4)
    options: dict[str, Any] = {"documents": drawn.documents}
    chunks = list(chat().stream(drawn.question, **options))
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    assert sum(bool(chunk.response_metadata) for chunk in chunks) == 1
    assert chunks[-1].chunk_position == "last"
    whole = chat().invoke(drawn.question, **options)
    together = functools.reduce(operator.add, chunks)
    assert (together.text, together.usage_metadata) == (whole.text, whole.usage_metadata)
    assert steady(together) == steady(whole)


def test_the_text_model_tells_it_too() -> None:
    model = RagWindows(lm=reader(), max_tokens=16)
    (made,) = model.generate([BORN], documents=[OTHER, DOCUMENT]).generations[0]
    info = made.generation_info or {}
    assert made.text == "Arava" == "".join(model.stream(BORN, documents=[OTHER, DOCUMENT]))
    assert [entry["cited"] for entry in info["citations"]] == [False, True]
    assert info["usage_metadata"]["input_token_details"] == {"cache_read": 0}
