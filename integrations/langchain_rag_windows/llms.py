"""The text model."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LLM, LangSmithParams
from langchain_core.messages import HumanMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict

from langchain_rag_windows.answers import response_metadata, usage_metadata
from langchain_rag_windows.calls import AnswersCalls, ModelCall
from rag_windows import Chunk
from rag_windows import Generation as Answer

_of_this_call: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "rag_windows_keywords", default=None
)


@contextmanager
def _known(keywords: Mapping[str, Any]) -> Iterator[None]:
    token = _of_this_call.set(dict(keywords))
    try:
        yield
    finally:
        _of_this_call.reset(token)


class RagWindows(AnswersCalls, LLM):
    """A local text model that reads each document in a window of its own.

    The prompt is asked as a user's question, through the model's chat template where it has one.
    Documents come with ``documents=``, or from a stock chain that formats them with
    `WindowDocumentPrompt`. Arguments and further keywords are those of `ChatRagWindows`. What is
    known of an answer beside its text stands in ``generation_info`` of ``generate``'s result.

    Example:
        llm = RagWindows(model="tiny-reader")
        llm.invoke("Where was Alra Ashden born?", documents=retriever.invoke(...))
    """

    model_config = ConfigDict(extra="forbid")

    @property
    def _llm_type(self) -> str:
        return "rag-windows"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._identity()

    def asdict(self) -> dict[str, Any]:
        """What identifies an answer.

        LangChain's cache finds text answers by this and the prompt, but not by a call's keywords:
        without them, other documents would get the cached answer.
        """
        keywords = _of_this_call.get()
        return {**super().asdict(), **({"keywords": keywords} if keywords else {})}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._tracing_params("llm", stop, kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text in the model's own vocabulary, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._token_ids(text)

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Answer prompts, see `LLM.generate`."""
        with _known(_own(kwargs)):
            return super().generate(prompts, stop, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Answer prompts, see `LLM.agenerate`."""
        with _known(_own(kwargs)):
            return await super().agenerate(prompts, stop, *args, **kwargs)

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return self._answered([[HumanMessage(prompt)]], stop, kwargs, _answers)[0][0].text

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        asked = [[HumanMessage(prompt)] for prompt in prompts]
        return LLMResult(generations=list(self._answered(asked, stop, kwargs, _answers)))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        asked = [[HumanMessage(prompt)] for prompt in prompts]
        answers = (self._answered_async(one, stop, kwargs, _answers) for one in asked)
        return LLMResult(generations=await asyncio.gather(*answers))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        yield from self._streamed([HumanMessage(prompt)], stop, kwargs, _chunks, run_manager)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        asked = [HumanMessage(prompt)]
        pieces = self._streamed_async(asked, stop, kwargs, _chunks, run_manager)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece


def _answers(call: ModelCall, best: Answer) -> list[Generation]:
    return [
        Generation(text=made.text, generation_info=_info(call, made))
        for made in (best, *best.alternatives)
    ]


def _chunks(call: ModelCall, chunk: Chunk) -> Iterator[GenerationChunk]:
    info = None if chunk.generation is None else _info(call, chunk.generation)
    if chunk.text or info:
        yield GenerationChunk(text=chunk.text, generation_info=info)


def _info(call: ModelCall, made: Answer) -> dict[str, Any]:
    return {**response_metadata(call, made), "usage_metadata": usage_metadata(made)}


_LANGCHAIN_S = ("callbacks", "tags", "metadata", "run_name", "run_id")


def _own(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _LANGCHAIN_S}
