"""The text model."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LLM, LangSmithParams
from langchain_core.messages import HumanMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict

from langchain_rag_windows.calls import prepare, watch_of
from langchain_rag_windows.options import EngineOptions
from langchain_rag_windows.results import usage_metadata
from rag_windows.background import Watch, iterate, run

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
        return self._whole(prompt, stop, kwargs, watch_of(self, kwargs))[0].text

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        answers = [self._whole(p, stop, kwargs, watch_of(self, kwargs)) for p in prompts]
        return LLMResult(generations=answers)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        async def answer(prompt: str) -> list[Generation]:
            watch = watch_of(self, kwargs)
            return await run(self._pool(), lambda: self._whole(prompt, stop, kwargs, watch), watch)

        return LLMResult(generations=await asyncio.gather(*map(answer, prompts)))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with closing(self._pieces(prompt, stop, kwargs, watch_of(self, kwargs))) as pieces:
            for piece in pieces:
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
        pieces = iterate(self._pool(), lambda: self._pieces(prompt, stop, kwargs, watch), watch)
        async with aclosing(pieces):
            async for piece in pieces:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece.text, chunk=piece)
                yield piece

    def _whole(
        self, prompt: str, stop: list[str] | None, kwargs: Mapping[str, Any], watch: Watch
    ) -> list[Generation]:
        call = prepare(self, [HumanMessage(prompt)], stop, kwargs, watch)
        best = call.whole()
        return [
            Generation(
                text=made.text,
                generation_info={**call.metadata(made), "usage_metadata": usage_metadata(made)},
            )
            for made in (best, *best.alternatives)
        ]

    def _pieces(
        self, prompt: str, stop: list[str] | None, kwargs: Mapping[str, Any], watch: Watch
    ) -> Generator[GenerationChunk, None, None]:
        call = prepare(self, [HumanMessage(prompt)], stop, kwargs, watch)
        with closing(call.pieces()) as chunks:
            for chunk in chunks:
                made = chunk.generation
                info = None
                if made is not None:
                    info = {**call.metadata(made), "usage_metadata": usage_metadata(made)}
                if chunk.text or info:
                    yield GenerationChunk(text=chunk.text, generation_info=info)


_LANGCHAIN_S = ("callbacks", "tags", "metadata", "run_name", "run_id")


def _own(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _LANGCHAIN_S}
