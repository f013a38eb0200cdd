"""All ways in which documents come in, and what the server retrieves by itself."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows import WindowedLM
from rag_windows_retrievers import BM25Retriever
from rag_windows_server import Settings, create_app
from rag_windows_server.documents import parse_sources
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import QUESTION, ask, body

TEXT = "Zelwick Academy makes cheese."
TITLED = {"title": "Zelwick Academy", "text": TEXT}


def file_part(mime: str = "text/plain") -> dict[str, Any]:
    data = f"data:{mime};base64,{base64.b64encode(TEXT.encode()).decode()}"
    return {"type": "file", "file": {"filename": "z.txt", "file_data": data}}


def parts(*given: dict[str, Any]) -> dict[str, Any]:
    content = [*given, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": content}]}


def from_tool(**fields: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "found", **fields},
        ]
    }


@pytest.mark.parametrize(
    ("fields", "identity", "title"),
    [
        ({"documents": [TEXT]}, None, None),
        ({"documents": [{"id": "z", **TITLED, "metadata": {"a": 1}}]}, "z", "Zelwick Academy"),
        ({"documents": [TITLED]}, None, "Zelwick Academy"),
        ({"documents": [{"id": "z", "data": TEXT}]}, "z", None),
        ({"documents": [{"id": "z", "data": TITLED}]}, "z", "Zelwick Academy"),
        ({"documents": [{"page_content": TEXT, "metadata": {"id": "z"}}]}, "z", None),
        ({"chat_template_kwargs": {"documents": [TITLED]}}, None, "Zelwick Academy"),
        (parts({"type": "document", "document": {"id": "z", "data": TEXT}}), "z", None),
        (parts({"type": "document", "id": "z", **TITLED}), "z", "Zelwick Academy"),
        (
            parts(
                {
                    "type": "document",
                    "title": "Zelwick Academy",
                    "source": {"type": "text", "media_type": "text/plain", "data": TEXT},
                }
            ),
            None,
            "Zelwick Academy",
        ),
        (parts({"type": "text-plain", "text": TEXT}), None, None),
        (parts(file_part()), "z.txt", None),
        (from_tool(artifact=[{"id": "z", **TITLED}]), "z", "Zelwick Academy"),
    ],
)
async def test_ways_in(
    client: httpx.AsyncClient,
    lm: WindowedLM,
    fields: dict[str, Any],
    identity: str | None,
    title: str | None,
) -> None:
    answer = await ask(client, **fields)
    message = answer["choices"][0]["message"]
    (citation,) = message["citations"]
    assert (citation["id"], citation["title"]) == (identity, title)
    brought = (fields.get("documents") or [None])[0]
    if isinstance(brought, dict) and "a" in brought.get("metadata", {}):
        assert citation["metadata"] == {"a": 1}
    passage = {"text": TEXT, "title": title}
    expected = lm.generate(QUESTION, [passage], do_sample=False)
    assert message["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert expected.citations is not None
    assert citation["weight"] == pytest.approx(expected.citations[0].mass, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": "one"}, "documents"),
        ({"documents": [{"id": "z"}]}, "documents[0]"),
        ({"documents": [{"id": "z", "data": 1}]}, "documents[0].data"),
        ({"documents": [{"text": 1}]}, "documents[0]"),
        ({"documents": [{"text": "A", "metadata": 1}]}, "documents[0].metadata"),
        ({"documents": [{"text": "A", "score": "much"}]}, "documents[0]"),
        (
            {"documents": ["A"], "chat_template_kwargs": {"documents": ["B"]}},
            "documents",
        ),
        (parts({"type": "file", "file": {"file_id": "f"}}), "messages[0].content[0].file"),
        (parts(file_part("application/pdf")), "messages[0].content[0].file"),
        (
            parts({"type": "document", "source": {"type": "url", "url": "http://x.org"}}),
            "messages[0].content[0].source",
        ),
        (from_tool(artifact="x"), "messages[2].artifact"),
        ({"documents": ["A"] * 300}, "documents"),
    ],
)
async def test_what_is_no_document(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/chat/completions", json=body(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_addresses_of_documents(client: httpx.AsyncClient) -> None:
    url = "https://example.org/zelwick?x=1"
    for document, expected in (
        ({"text": TEXT, "url": url}, url),
        ({"text": TEXT, "metadata": {"source": url}}, url),
        ({"text": TEXT, "id": "a b", "url": "file:///etc/passwd"}, "passage:a%20b"),
        ({"text": TEXT, "url": "javascript:alert(1)"}, "passage:0"),
    ):
        message = (await ask(client, documents=[document]))["choices"][0]["message"]
        assert message["annotations"][0]["url_citation"]["url"] == expected


async def test_follow_up_questions_retrieve_with_the_conversation(
    client: httpx.AsyncClient, corpus: BM25Retriever
) -> None:
    told = [
        {"role": "user", "content": "What does Zelwick Academy make?"},
        {"role": "assistant", "content": "cheese"},
        {"role": "user", "content": "Who founded it?"},
    ]
    assert "zelwick" not in str(corpus.retrieve(told[-1]["content"], 1)).lower()
    message = (await ask(client, messages=told, rag={"top_k": 1}))["choices"][0]["message"]
    assert message["citations"][0]["id"] == "zelwick-academy.md#1"


async def test_without_documents_of_its_own(lm: WindowedLM) -> None:
    async with asking(create_app(lm)) as client:
        assert (await ask(client))["choices"][0]["message"]["citations"] == []
        answer = await client.post("/v1/chat/completions", json=body(rag={"top_k": 1}))
        assert answer.json()["error"]["param"] == "rag.top_k"


SOURCES = (
    'Use the context.\n<context>\n<source id="1" name="Zelwick Academy">'
    f'{TEXT}</source>\n<source id="2" name="a &quot;b&quot;">Other.</source>\n</context>\n'
)


async def test_sources_of_open_webui(lm: WindowedLM, client: httpx.AsyncClient) -> None:
    asked = {"messages": [{"role": "user", "content": SOURCES + QUESTION}], "rag": {"top_k": 0}}
    assert (await ask(client, **asked))["choices"][0]["message"]["citations"] == []
    async with asking(create_app(lm, Settings(parse_sources=True))) as parsing:
        message = (await ask(parsing, messages=asked["messages"]))["choices"][0]["message"]
    assert [one["id"] for one in message["citations"]] == ["1", "2"]
    assert [one["title"] for one in message["citations"]] == ["Zelwick Academy", 'a "b"']
    assert message["content"] == "cheese"
    assert parse_sources(SOURCES + QUESTION)[0] == f"Use the context.\n{QUESTION}"


@given(st.text('<>/ source="id1\n'))
def test_texts_without_whole_sources_stay(text: str) -> None:
    rest, passages = parse_sources(text)
    assert passages or rest == text
