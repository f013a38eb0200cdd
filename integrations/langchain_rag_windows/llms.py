"""The text model."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LLM, LangSmithParams
from langchain_core.messages import HumanMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict

from langchain_rag_windows.calls import Call, prepare, watch_of
from langchain_rag_windows.options import EngineOptions
from langchain_rag_windows.results import usage_metadata
from langchain_rag_windows.running import finished, streamed, together
from rag_windows import Chunk
from rag_windows import Generation as Answer
from rag_windows.streaming import Watch

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


class RagWindows(EngineOptions, LLM):
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
        with self.crowd.entered():
            return self._prepared(prompt, stop, kwargs).whole().text

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with self.crowd.entered():
            calls = [self._prepared(prompt, stop, kwargs) for prompt in prompts]
            answers = map(_answers, calls, together(calls))
            return LLMResult(generations=list(answers))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        async def answer(prompt: str) -> list[Generation]:
            watch = watch_of(self, kwargs)
            return await finished(
                self, watch, lambda: self._prepared(prompt, stop, kwargs, watch), _answers
            )

        return LLMResult(generations=await asyncio.gather(*map(answer, prompts)))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._prepared(prompt, stop, kwargs)
        with closing(call.pieces()) as chunks:
            for piece in (piece for chunk in chunks for piece in _chunks(call, chunk)):
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece.text, chunk=piece)
                yield piece

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        watch = watch_of(self, kwargs)
        pieces = streamed(self, watch, lambda: self._prepared(prompt, stop, kwargs, watch), _chunks)
        async with aclosing(pieces):
            async for piece in pieces:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece.text, chunk=piece)
                yield piece

    def _prepared(
        self,
        prompt: str,
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
        watch: Watch | None = None,
    ) -> Call:
        watch = watch or watch_of(self, kwargs)
        return prepare(self, [HumanMessage(prompt)], stop, kwargs, watch)


def _answers(call: Call, best: Answer) -> list[Generation]:
    return [
        Generation(text=made.text, generation_info=_info(call, made))
        for made in (best, *best.alternatives)
    ]


def _chunks(call: Call, chunk: Chunk) -> Iterator[GenerationChunk]:
    info = None if chunk.generation is None else _info(call, chunk.generation)
    if chunk.text or info:
        yield GenerationChunk(text=chunk.text, generation_info=info)


def _info(call: Call, made: Answer) -> dict[str, Any]:
    return {**call.metadata(made), "usage_metadata": usage_metadata(made)}


_LANGCHAIN_S = ("callbacks", "tags", "metadata", "run_name", "run_id")


def _own(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _LANGCHAIN_S}
