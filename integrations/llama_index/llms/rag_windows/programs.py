"""Templates for structured answers, with windows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate

from llama_index.llms.rag_windows.parts import WindowedPrompt
from llama_index.llms.rag_windows.passages import block_of_passage
from llama_index.llms.rag_windows.templates import find_parts, window_messages
from rag_windows.errors import InputError


class WindowTemplate(BasePromptTemplate):
    """A template that puts its passages into citable blocks, each read in a window of its own.

    Attributes:
        inner: the template as it was.
        reader: the LLM that selects among its variants.
    """

    inner: BasePromptTemplate
    reader: Any

    @classmethod
    def of(
        cls, prompt: BasePromptTemplate, arguments: Mapping[str, Any], llm: LLM
    ) -> BasePromptTemplate:
        """The template for these arguments: ``prompt`` itself if they hold no `Parts`."""
        if isinstance(prompt, cls) or find_parts(prompt, arguments, llm) is None:
            return prompt
        return cls(
            # Its output parser is applied here, once, to the messages with their passages.
            inner=prompt.model_copy(update={"output_parser": None}),
            reader=llm,
            metadata=prompt.metadata,
            template_vars=prompt.template_vars,
            kwargs=prompt.kwargs,
            output_parser=prompt.output_parser,
        )

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """Instruction, history, and the question behind its passages."""
        arguments = {**self.kwargs, **kwargs}
        found = find_parts(self.inner, arguments, self.reader)
        if found is None:
            raise InputError("This template needs Parts for its passages; see Parts.of.")
        messages = window_messages(self.inner, arguments, self.reader)
        blocks = [block_of_passage(passage) for passage in found[1].passages]
        messages[-1].blocks = [*blocks, *messages[-1].blocks]
        if self.output_parser is not None:
            messages = self.output_parser.format_messages(messages)
        return messages

    def format(
        self,
        llm: BaseLLM | None = None,
        messages_to_prompt: Callable[..., str] | None = None,
        completion_to_prompt: Callable[[str], str] | None = None,
        **kwargs: Any,
    ) -> str:
        """The question, as a string that carries all messages."""
        messages = self.reader._extend_messages(self.format_messages(llm, **kwargs))
        return WindowedPrompt.of(messages[-1].content or "", messages)

    def partial_format(self, **kwargs: Any) -> WindowTemplate:
        """The template with some variables filled."""
        return self.model_copy(update={"kwargs": {**self.kwargs, **kwargs}})

    def get_template(self, llm: BaseLLM | None = None) -> str:
        """The template as it was."""
        return self.inner.get_template(llm)


def plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method without the span that LlamaIndex put around it: its override has one already."""
    return inspect.unwrap(method)
