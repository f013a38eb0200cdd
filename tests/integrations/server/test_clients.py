"""Real clients of OpenAI's API over a socket: each gets its answers, its citations and its errors.

LangChain's suite leaves out tools (the shipped reader's template has none) and what it can't write:
JSON by itself, images, another model in a call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import httpx
import openai
import pytest
from fastapi import FastAPI
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, SecretStr

from rag_windows import WindowedLM
from rag_windows.integration import schemas_available
from rag_windows_retrievers import BM25Retriever
from rag_windows_server import Settings, create_app

Listen = Callable[[FastAPI], str]
KEY = "a-key-of-a-client-0123456789"
QUESTION = "What does Zelwick Academy make?"
DOCUMENTS: list[Any] = [
    {"id": "z", "title": "Zelwick Academy", "text": "Zelwick Academy makes cheese."},
    "Sulava lies on the river Orn.",
]
ASKED: dict[str, Any] = {
    "model": "tiny-reader",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "extra_body": {"documents": DOCUMENTS},
}


@pytest.fixture
def sdk(address: str) -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


@pytest.mark.slow
def test_openai_whole(sdk: openai.OpenAI, lm: WindowedLM) -> None:
    answer = sdk.chat.completions.create(**ASKED)
    message = answer.choices[0].message
    expected = lm.generate(QUESTION, DOCUMENTS, do_sample=False)
    assert message.content == expected.text
    assert message.annotations is not None
    assert message.annotations[0].url_citation.url == "passage:z"
    assert message.annotations[0].url_citation.title == "Zelwick Academy"
    assert message.model_extra is not None
    assert [one["index"] for one in message.model_extra["citations"]] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected.usage.completion_tokens


def test_openai_stream(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**ASKED).choices[0].message
    *chunks, counted = sdk.chat.completions.create(
        **ASKED, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole.content
    last = chunks[-1].choices[0]
    assert last.finish_reason == "stop"
    assert last.delta.model_extra is not None
    assert last.delta.model_extra["annotations"][0]["url_citation"]["url"] == "passage:z"
    assert counted.choices == []
    assert counted.usage is not None
    assert counted.usage.prompt_tokens_details is not None
    assert counted.usage.prompt_tokens_details.cached_tokens


def test_openai_stream_helper(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(**ASKED) as stream:
        kinds = {event.type for event in stream}
        assert {"content.delta", "content.done", "chunk"} <= kinds
        assert stream.get_final_completion().choices[0].message.content == "cheese"


async def test_openai_async(address: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY) as sdk:
        answers = await asyncio.gather(*(sdk.chat.completions.create(**ASKED) for _ in range(4)))
        assert {one.choices[0].message.content for one in answers} == {"cheese"}
        stream = await sdk.chat.completions.create(**ASKED, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "cheese"
        assert [one.id async for one in sdk.models.list()] == ["tiny-reader"]


@pytest.mark.parametrize(
    ("changed", "kind", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"store": True}, openai.BadRequestError, "store"),
        ({"extra_body": {"dokuments": []}}, openai.BadRequestError, "dokuments"),
        ({"extra_body": {"documents": [{"id": "z"}]}}, openai.BadRequestError, "documents[0]"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
    ],
)
def test_openai_errors(
    sdk: openai.OpenAI, changed: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            sdk.chat.completions.create(**{**ASKED, **changed}, stream=stream)
        assert raised.value.param == param
        assert raised.value.code
        assert raised.value.request_id


def one_loop() -> httpx.AsyncClient:
    """Else LangChain keeps a client for each address, with connections of loops that have ended."""
    return httpx.AsyncClient(timeout=60)


def langchain(address: str, **options: Any) -> ChatOpenAI:
    """LangChain's model of OpenAI."""
    return ChatOpenAI(
        model="tiny-reader",
        base_url=f"{address}/v1",
        api_key=SecretStr(KEY),
        temperature=0,
        max_retries=0,
        http_async_client=one_loop(),
        **options,
    )


def test_langchain_rag_chain(address: str, corpus: BM25Retriever) -> None:
    model = langchain(address)

    def found(question: str) -> list[Document]:
        return [Document(one.text, id=one.id) for one in corpus.retrieve(question, 4)]

    def ask(given: dict[str, Any]) -> Any:
        documents = [{"id": one.id, "text": one.page_content} for one in given["context"]]
        prompt = ChatPromptTemplate.from_messages([("human", "{question}")])
        chain = prompt | model.bind(extra_body={"documents": documents})
        return chain.invoke({"question": given["question"]})

    chain = {"context": RunnableLambda(found), "question": RunnablePassthrough()} | RunnableLambda(
        ask
    )
    message = chain.invoke(QUESTION)
    assert message.content == "cheese"
    assert message.usage_metadata["output_tokens"] == 2
    assert (chain | StrOutputParser()).batch([QUESTION] * 3) == ["cheese"] * 3


async def test_langchain_streams(address: str) -> None:
    model = langchain(address, extra_body={"documents": DOCUMENTS}, stream_usage=True)
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == "cheese"
    chunks = [chunk async for chunk in model.astream(QUESTION)]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == "cheese"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["input_token_details"]["cache_read"] > 0
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        await model.ainvoke(QUESTION, frequency_penalty=9)


class Product(BaseModel):
    """What is made."""

    product: Literal["steel", "cheese"]


@pytest.mark.skipif(not schemas_available(), reason="needs llguidance")
def test_structured_output(address: str, sdk: openai.OpenAI) -> None:
    """Both libraries' ways to an object are held to its schema."""
    parsed = sdk.chat.completions.parse(**ASKED, response_format=Product)
    assert parsed.choices[0].message.parsed == Product(product="cheese")
    model = langchain(address, extra_body={"documents": DOCUMENTS})
    found = model.with_structured_output(Product, method="json_schema").invoke(QUESTION)
    assert found == Product(product="cheese")


class TestLangChain(ChatModelIntegrationTests):
    """LangChain's own suite for chat models."""

    @pytest.fixture(autouse=True)
    def _served(self, address: str) -> None:
        self.address = address

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "tiny-reader",
            "base_url": f"{self.address}/v1",
            "api_key": KEY,
            "temperature": 0,
            "stream_usage": True,
            "max_retries": 0,
            "http_async_client": one_loop(),
            "extra_body": {"documents": DOCUMENTS},
        }

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestLangChainResponses(TestLangChain):
    """The same over the route of responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class Found(BaseRetriever):
    """LlamaIndex nodes of the sample documents."""

    def __init__(self, corpus: BM25Retriever) -> None:
        super().__init__()
        self._corpus = corpus

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._corpus.retrieve(query_bundle.query_str, 4)
        return [NodeWithScore(node=TextNode(text=one.text), score=one.score) for one in found]


def open_ai_like(address: str, documents: list[dict[str, str | None]]) -> OpenAILike:
    return OpenAILike(
        model="tiny-reader",
        api_base=f"{address}/v1",
        api_key=KEY,
        is_chat_model=True,
        temperature=0,
        max_retries=0,
        context_window=4096,
        additional_kwargs={"extra_body": {"documents": documents}},
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_llama_index_query_engine(address: str, corpus: BM25Retriever, streaming: bool) -> None:
    documents = [{"id": one.id, "text": one.text} for one in corpus.retrieve(QUESTION, 4)]
    llm = open_ai_like(address, documents)
    # The passages go as documents, and not into the prompt.
    bare = PromptTemplate("{query_str}")
    made = get_response_synthesizer(llm=llm, text_qa_template=bare, streaming=streaming)
    engine = RetrieverQueryEngine(Found(corpus), response_synthesizer=made)
    answer = engine.query(QUESTION)
    assert str(answer) == "cheese"
    assert len(answer.source_nodes) == 4


async def test_llama_index_keeps_citations(address: str) -> None:
    llm = open_ai_like(address, DOCUMENTS)
    answer = await llm.acomplete(QUESTION)
    assert answer.raw is not None
    assert answer.raw.choices[0].message.citations[0]["id"] == "z"
    *_, last = [one async for one in await llm.astream_complete(QUESTION)]
    assert last.text == "cheese"
    assert last.raw is not None
    assert last.raw.choices[0].delta.citations[0]["id"] == "z"


CONTEXT = "".join(
    f'<source id="{number}" name="{name}">{text}</source>\n'
    for number, (name, text) in enumerate(
        [("academy &amp; cheese.md", "Zelwick Academy makes cheese."), ("river.md", DOCUMENTS[1])],
        1,
    )
)


@pytest.mark.parametrize("role", ["user", "system"])
def test_open_webui_chat(listening: Listen, lm: WindowedLM, role: str) -> None:
    """Its sources in the last question, or in the system's message, and its stream's options."""
    address = listening(create_app(lm, Settings(parse_sources=True)))
    template = f"<context>\n{CONTEXT}</context>\n\n"
    messages = [{"role": "user", "content": QUESTION}]
    if role == "system":
        messages.insert(0, {"role": "system", "content": template})
    else:
        messages[0]["content"] = template + QUESTION
    given = {
        "model": "tiny-reader",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 64,
    }
    deltas, text = [], ""
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=given, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                deltas += [one["delta"] for one in event["choices"]]
        assert event["usage"]["total_tokens"] > 0
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == "cheese"
    noted = [one["url_citation"] for delta in deltas for one in delta.get("annotations", ())]
    assert noted[0]["url"] == "passage:1"
    assert noted[0]["title"] == "academy & cheese.md"


def test_open_webui_sources_are_text_unless_allowed(address: str) -> None:
    messages = [{"role": "user", "content": f"<context>\n{CONTEXT}</context>\n{QUESTION}"}]
    given = {"model": "tiny-reader", "messages": messages, "rag": {"top_k": 0}}
    answer = httpx.post(f"{address}/v1/chat/completions", json=given, timeout=60).json()
    assert answer["choices"][0]["message"]["citations"] == []
