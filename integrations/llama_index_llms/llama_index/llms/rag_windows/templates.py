"""Prompt templates whose context is read in windows.

The windows stand before the question, behind the instruction. A template is therefore rendered
with marks in place of context and question; what it says around them in one message becomes the
instruction, and only the question the user's message. So a window depends on the template, but not
on the question, and its keys and values can be used again for the next one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Self, cast

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, MessageRole, TextBlock
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows.integration import PassageLike, refuse_single

QUERY = "query_str"
"""The template variable that LlamaIndex gives the question."""

_LABEL = re.compile(r"[\W_]*+\w++(?: \w++)?\s*+:[\W_]*+")
"""A line such as "Query:" or "Refined Answer:", left over without what it announced."""


class Parts(str):
    """Several passages as one string.

    Every other LLM sees the texts with a blank line between; `RagWindowsLLM` reads ``passages``,
    each in a window of its own. What makes a plain string of it (``strip``, ``format``, ``+``)
    loses the parts.

    Attributes:
        passages: in order.
    """

    passages: tuple[Passage, ...] = ()

    @classmethod
    def of(cls, passages: Iterable[PassageLike]) -> Self:
        """Join passages, as `Passage.of` reads them."""
        refuse_single(passages)
        read = tuple(Passage.of(passage) for passage in passages)
        parts = cls("\n\n".join(passage.text for passage in read))
        parts.passages = read
        return parts


class WindowedPrompt(str):
    """A prompt string that carries the messages it stands for, with their passages.

    LlamaIndex passes it from a template to ``complete``.
    """

    messages: tuple[ChatMessage, ...] = ()

    @classmethod
    def of(cls, messages: Sequence[ChatMessage]) -> Self:
        """A prompt that reads as the last of these messages."""
        prompt = cls(messages[-1].content or "")
        prompt.messages = tuple(messages)
        return prompt


class WindowTemplate(BasePromptTemplate):
    """The messages of a template whose passages became citable blocks, one window each."""

    messages: list[ChatMessage]

    @classmethod
    def of(
        cls, prompt: BasePromptTemplate, arguments: Mapping[str, Any], llm: LLM
    ) -> BasePromptTemplate:
        """The template with these arguments: ``prompt`` itself if they hold no `Parts`."""
        chosen = _chosen(prompt, llm)
        values = {**chosen.kwargs, **arguments}
        found = [name for name, value in values.items() if isinstance(value, Parts)]
        if isinstance(prompt, cls) or not found:
            return prompt
        if len(found) > 1:
            raise InputError(
                f"The template variables {sorted(found)} all hold passages. Give passages in one "
                "of them."
            )
        parser = chosen.output_parser
        # It is applied to the messages with their passages, once.
        messages = _messages(chosen.model_copy(update={"output_parser": None}), values, found[0])
        # Score and metadata have no place in a message.
        blocks = [
            CitableBlock(title=p.title or "", source=p.id or "", content=[TextBlock(text=p.text)])
            for p in values[found[0]].passages
        ]
        messages[-1].blocks = [*blocks, *messages[-1].blocks]
        return cls(
            messages=messages,
            metadata=prompt.metadata,
            template_vars=[],
            kwargs={},
            output_parser=parser,
        )

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """Instruction, history, and the question behind its passages."""
        messages = [message.model_copy(deep=True) for message in self.messages]
        parser = self.output_parser
        return messages if parser is None else parser.format_messages(messages)

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        """The question, as a string that carries all messages."""
        messages = self.format_messages()
        return WindowedPrompt.of(cast(LLM, llm)._extend_messages(messages) if llm else messages)

    def partial_format(self, **kwargs: Any) -> WindowTemplate:
        """The template: nothing is left to fill."""
        return self

    def get_template(self, llm: BaseLLM | None = None) -> str:
        """The question."""
        return _text(self.messages[-1])


def _messages(
    template: BasePromptTemplate, values: Mapping[str, Any], context: str
) -> list[ChatMessage]:
    """The messages of a template, without the passages: instruction, history, question.

    Where the last one holds the passages' place and the question, its other text is the
    instruction, and the question all that is left of it. Elsewhere the place is taken out.
    """
    marks = {name: f"⟦{secrets.token_hex(16)}⟧" for name in (context, QUERY) if name in values}
    question = str(values.get(QUERY, ""))
    rendered = template.format_messages(**{**values, **marks})
    messages = [message.model_copy(deep=True) for message in rendered]
    if not any(marks[context] in _text(message) for message in messages):
        raise InputError(
            f"The prompt template does not show {context!r}, or a function mapping of it changes "
            f"that text, so the passages would be lost. Put {{{context}}} into the template."
        )
    # A line that frames the passages is the template's; one like it in a value is somebody's words.
    inner: Sequence[ChatMessage] = getattr(template, "message_templates", ())
    written = "\n".join(map(_text, inner)) if inner else template.get_template()
    for name, mark in marks.items():
        shown = (template.template_var_mappings or {}).get(name, name)
        written = written.replace(f"{{{shown}}}", mark)
    frames = {line.strip() for line in written.split("\n")}
    instruction, query = "", marks.get(QUERY)
    for message in messages:
        text = rest = _text(message)
        if marks[context] in text:
            if message is messages[-1] and query and query in text:
                instruction, rest = _without(text, [*marks.values()], frames), question
            else:
                rest = _without(text, [marks[context]], frames)
        if query:
            rest = rest.replace(query, question)
        if rest != text:
            message.blocks = [TextBlock(text=rest)]
    if instruction:
        first = int(messages[0].role == MessageRole.SYSTEM)
        messages.insert(first, ChatMessage(role=MessageRole.SYSTEM, content=instruction))
    return [m for m in messages if m.role != MessageRole.SYSTEM or _text(m).strip()]


def checked_template(template: BasePromptTemplate, llm: LLM) -> BasePromptTemplate:
    """The template itself, if nothing of it or of a request would be lost."""
    if not isinstance(template, BasePromptTemplate):
        raise InputError(
            "A template must be a PromptTemplate or ChatPromptTemplate, not "
            f"{type(template).__name__}. Use PromptTemplate(text)."
        )
    chosen = _chosen(template, llm)
    renamed = {new: old for old, new in (chosen.template_var_mappings or {}).items()}
    names = {renamed.get(name, name) for name in chosen.template_vars} - set(chosen.kwargs)
    for name, what in ((QUERY, "question"), ("context_str", "passages")):
        if name not in names:
            raise InputError(
                f"The template has no variable {{{name}}}, so the {what} would be lost. Put "
                f"{{{name}}} where the {what} would stand in one prompt."
            )
    open_names = sorted(names - {"context_str", QUERY} - set(chosen.function_mappings or {}))
    if open_names:
        raise InputError(
            f"The template has variables without a value: {open_names}. Fill them with "
            "template.partial_format(...)."
        )
    return template


def _without(text: str, marks: Sequence[str], frames: Set[str]) -> str:
    """Text with marks taken out, and what only framed them.

    A line of the template (see ``frames``) goes that held nothing else but a label; so do its
    rulers (lines without a letter or digit) around it, and its label at the end ("Answer:").
    """

    def label(line: str, rest: str) -> bool:
        return line.strip() in frames and _LABEL.fullmatch(rest.strip()) is not None

    lines: list[str | None] = []
    for line in text.split("\n"):
        bare = line
        for mark in marks:
            bare = bare.replace(mark, "")
        gone = bare != line and (not any(map(str.isalnum, bare)) or label(line, bare))
        lines.append(None if gone else bare)
    for index in [i for i, line in enumerate(lines) if line is None]:
        for around in (range(index - 1, -1, -1), range(index + 1, len(lines))):
            near = next((i for i in around if (lines[i] or "").strip()), index)
            ruler = (lines[near] or "").strip()
            if ruler in frames and not any(map(str.isalnum, ruler)):
                lines[near] = None
    rest: list[str] = []
    gap = False  # lines went since the last one that stayed
    for each in lines:
        if each is None:
            gap = True
        elif each.strip() or not gap or (rest and rest[-1].strip()):
            rest.append(each)
            gap = False
    while rest and (not rest[-1].strip() or label(rest[-1], rest[-1])):
        rest.pop()
    return "\n".join(rest).strip()


def _text(message: ChatMessage) -> str:
    return message.content or ""


def _chosen(prompt: BasePromptTemplate, llm: LLM) -> BasePromptTemplate:
    return prompt.select(llm) if isinstance(prompt, SelectorPromptTemplate) else prompt
