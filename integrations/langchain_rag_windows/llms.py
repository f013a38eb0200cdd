"""The text model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LLM
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict

from langchain_rag_windows.answers import response_metadata, usage_metadata
from langchain_rag_windows.base_model import BaseWindowModel
from rag_windows import Chunk
from rag_windows import Generation as Answer
from rag_windows.integration import ModelCall

_KEYWORDS: ContextVar[Mapping[str, Any]] = ContextVar("rag_windows_keywords")
_LANGCHAIN_S = ("callbacks", "tags", "metadata", "run_name", "run_id")


@contextmanager
def _known(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let `RagWindows.asdict` know the keywords of a call."""
    token = _KEYWORDS.set({k: value for k, value in kwargs.items() if k not in _LANGCHAIN_S})
    try:
        yield
    finally:
        _KEYWORDS.reset(token)


class RagWindows(BaseWindowModel, LLM):  # type: ignore[misc]  # the first argument of _stream has another name in each
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

    def asdict(self) -> dict[str, Any]:
        """What identifies an answer.

        LangChain's cache finds text answers by this and the prompt, but not by a call's keywords:
        without them, other documents would get the cached answer.
        """
        keywords = _KEYWORDS.get({})
        return {**super().asdict(), **({"keywords": keywords} if keywords else {})}

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Answer prompts, see `LLM.generate`."""
        with _known(kwargs):
            return super().generate(prompts, stop, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Answer prompts, see `LLM.agenerate`."""
        with _known(kwargs):
            return await super().agenerate(prompts, stop, *args, **kwargs)

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return str(self._answered([prompt], stop, kwargs)[0][0].text)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return LLMResult(generations=self._answered(prompts, stop, kwargs))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        answers = (self._answered_async(prompt, stop, kwargs) for prompt in prompts)
        return LLMResult(generations=await asyncio.gather(*answers))

    def _messages(self, asked: Any) -> Sequence[BaseMessage]:
        return [HumanMessage(asked)]

    def _read(self, call: ModelCall, generation: Answer) -> list[Generation]:
        return [
            Generation(text=made.text, generation_info=_info(call, made))
            for made in (generation, *generation.alternatives)
        ]

    def _read_chunk(self, call: ModelCall, chunk: Chunk) -> Iterator[GenerationChunk]:
        info = None if chunk.generation is None else _info(call, chunk.generation)
        if chunk.text or info:
            yield GenerationChunk(text=chunk.text, generation_info=info)


def _info(call: ModelCall, made: Answer) -> dict[str, Any]:
    return {**response_metadata(call, made), "usage_metadata": usage_metadata(made)}
