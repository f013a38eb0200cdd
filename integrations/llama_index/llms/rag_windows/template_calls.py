"""Predict, stream and structured answers, with a template's passages as windows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, Self

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode

from llama_index.llms.rag_windows.parts import WindowedPrompt
from llama_index.llms.rag_windows.programs import WindowTemplate, plain
from llama_index.llms.rag_windows.questions import surfacing
from llama_index.llms.rag_windows.settings import Settings


class TemplateCalls(Settings):
    """LlamaIndex's calls that take a template.

    A template variable that holds `Parts` becomes windows. ``predict``, ``apredict``, ``stream``
    and ``astream`` are LlamaIndex's own over `_get_messages`; a structured answer that can't be
    parsed is a `GenerationError`, which synthesizers don't take for an empty response.

    Unless ``pydantic_program_mode`` says otherwise, a structured answer is one forced call of a
    tool where the chat template lets a call be begun, and JSON in the text elsewhere and in
    streams, whose calls would come whole with the last piece.
    """

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        template = WindowTemplate.of(prompt, prompt_args, self)
        return super()._get_messages(template, **prompt_args)

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        if WindowTemplate.of(prompt, prompt_args, self) is prompt:
            return super()._get_prompt(prompt, **prompt_args)
        messages = self._get_messages(prompt, **prompt_args)
        return WindowedPrompt.of(messages[-1].content or "", messages)

    def _extend_prompt(self, formatted_prompt: str) -> str:
        # The system prompt stands where the chat template has it, never inside the question.
        return formatted_prompt

    def _structuring(self, *, streaming: bool = False) -> Self:
        """This LLM, told how it is to give a structured answer."""
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return self
        form = self._source.tool_format()
        if form is None or (form.opening is not None and not streaming):
            return self
        return self.model_copy(update={"pydantic_program_mode": PydanticProgramMode.LLM})

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """An answer as an object of ``output_cls``."""
        template = WindowTemplate.of(prompt, prompt_args, self)
        with surfacing():
            return plain(LLM.structured_predict)(
                self._structuring(), output_cls, template, llm_kwargs, **prompt_args
            )

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """`structured_predict` beside the event loop."""
        template = WindowTemplate.of(prompt, prompt_args, self)
        with surfacing():
            return await plain(LLM.astructured_predict)(
                self._structuring(), output_cls, template, llm_kwargs, **prompt_args
            )

    def stream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """`structured_predict`, with what is known so far at each step."""
        template = WindowTemplate.of(prompt, prompt_args, self)
        with surfacing():
            yield from plain(LLM.stream_structured_predict)(
                self._structuring(streaming=True), output_cls, template, llm_kwargs, **prompt_args
            )

    async def astream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """`stream_structured_predict` beside the event loop."""
        template = WindowTemplate.of(prompt, prompt_args, self)
        objects = await plain(LLM.astream_structured_predict)(
            self._structuring(streaming=True), output_cls, template, llm_kwargs, **prompt_args
        )

        async def surfaced() -> AsyncGenerator[Any, None]:
            with surfacing():
                async for one in objects:
                    yield one

        return surfaced()
