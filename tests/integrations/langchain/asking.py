"""Chains and models, asked in every way, and what callbacks are told of the answers."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Callable
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.retrievers import BaseRetriever

from langchain_rag_windows import ChatRagWindows, RagWindows
from tests.integrations.cases import Case, reader


class Told(BaseCallbackHandler):
    """Keeps the metadata of every answer."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        made: Any = response.generations[0][0]
        chat = isinstance(made, ChatGeneration)
        metadata = made.message.response_metadata if chat else made.generation_info
        self.answers.append(dict(metadata or {}))


class ListRetriever(BaseRetriever):
    """Returns always the same documents, and notes what it was asked."""

    documents: list[Document]
    asked: list[str]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        self.asked.append(query)
        return list(self.documents)


def documents_of(case: Case) -> list[Document]:
    return [
        Document(page_content=one.text, id=one.id, metadata=dict(one.metadata))
        for one in case.passages
    ]


def retriever(case: Case) -> ListRetriever:
    return ListRetriever(documents=documents_of(case), asked=[])


def chat(**arguments: Any) -> ChatRagWindows:
    return ChatRagWindows(**{"lm": reader(), "max_tokens": 16, **arguments})


def text_model(**arguments: Any) -> RagWindows:
    return RagWindows(**{"lm": reader(), "max_tokens": 16, **arguments})


def text_of(answer: Any) -> str:
    """The answer's text, whatever a model, a chain or an agent gives back."""
    if isinstance(answer, dict):
        return text_of(answer["answer"] if "answer" in answer else answer["messages"][-1])
    return answer if isinstance(answer, str) else str(answer.text)


def streamed(runnable: Any, asked: Any, **options: Any) -> Any:
    return functools.reduce(operator.add, runnable.stream(asked, **options))


async def _streamed_async(runnable: Any, asked: Any, **options: Any) -> Any:
    return functools.reduce(operator.add, [one async for one in runnable.astream(asked, **options)])


async def ainvoke(runnable: Any, asked: Any, **options: Any) -> Any:
    return await runnable.ainvoke(asked, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "invoke": lambda runnable, asked, **options: runnable.invoke(asked, **options),
    "stream": streamed,
    "batch": lambda runnable, asked, **options: runnable.batch([asked], **options)[0],
    "ainvoke": lambda *asked, **options: asyncio.run(ainvoke(*asked, **options)),
    "astream": lambda *asked, **options: asyncio.run(_streamed_async(*asked, **options)),
    "abatch": lambda runnable, asked, **options: asyncio.run(runnable.abatch([asked], **options))[
        0
    ],
}
ASYNC: dict[str, Callable[..., Any]] = {"ainvoke": ainvoke, "astream": _streamed_async}
