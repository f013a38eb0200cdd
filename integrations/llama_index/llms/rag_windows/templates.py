"""Prompt templates whose context is read in windows.

The windows stand before the question, behind the instruction. A template is therefore rendered
with marks in place of context and question; what it says around them in one message becomes the
instruction, and the question alone the user's message. So a window depends on the template, but not
on the question, and its keys and values can be used again for the next one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, MessageRole, TextBlock
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows.integration import PassageLike

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
        kept = tuple(Passage.of(passage) for passage in passages)
        parts = cls("\n\n".join(passage.text for passage in kept))
        parts.passages = kept
        return parts


class WindowedPrompt(str):
    """A prompt string that carries the messages it stands for, with their passages.

    LlamaIndex passes it from a template to ``complete``.
    """

    messages: tuple[ChatMessage, ...] = ()

    @classmethod
    def of(cls, text: str, messages: Sequence[ChatMessage]) -> Self:
        """A prompt that reads ``text`` and stands for ``messages``."""
        prompt = cls(text)
        prompt.messages = tuple(messages)
        return prompt


class WindowTemplate(BasePromptTemplate):
    """A template that puts its passages into citable blocks, each read in a window of its own."""

    inner: BasePromptTemplate
    reader: Any  # the LLM that selects among its variants

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
        # Score and metadata have no place in a message.
        blocks = [
            CitableBlock(title=p.title or "", source=p.id or "", content=[TextBlock(text=p.text)])
            for p in found[1].passages
        ]
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


def find_parts(
    prompt: BasePromptTemplate, arguments: Mapping[str, Any], llm: LLM
) -> tuple[str, Parts] | None:
    """The one template variable that holds `Parts`, by name, with its value; None if none does."""
    values = {**_chosen(prompt, llm).kwargs, **arguments}
    found = [(name, value) for name, value in values.items() if isinstance(value, Parts)]
    if len(found) > 1:
        raise InputError(
            f"The template variables {sorted(name for name, _ in found)} all hold passages; give "
            "them in one."
        )
    return found[0] if found else None


def window_messages(
    prompt: BasePromptTemplate, arguments: Mapping[str, Any], llm: LLM
) -> list[ChatMessage]:
    """The messages of a template, without the passages: instruction, history, question.

    They are what the template renders, but for the last one: where that holds the passages' place
    and the question, its other text (without rulers and labels that lost their line's content) is
    the instruction, and the question is all that is left of it. Elsewhere the passages' place is
    taken out.
    """
    found = find_parts(prompt, arguments, llm)
    if found is None:
        raise InputError("No template variable holds Parts; make them with Parts.of(passages).")
    chosen = _chosen(prompt, llm)
    values = {**chosen.kwargs, **arguments}
    context, query = _mark(), _mark()
    marked = {**values, found[0]: context, **({QUERY: query} if QUERY in values else {})}
    messages = [message.model_copy(deep=True) for message in chosen.format_messages(llm, **marked)]
    texts = [_text(message) for message in messages]
    if not any(context in text for text in texts):
        raise InputError(
            f"The prompt template does not show {found[0]!r}, or a function mapping of it changes "
            f"that text, so the passages would be lost. Put {{{found[0]}}} into the template."
        )
    # A line that frames the passages is the template's; one like it in a value is somebody's words.
    # So values are marks, too, while lines are dropped.
    others = {name for name, value in marked.items() if isinstance(value, str) and value}
    marks = {name: _mark() for name in others - {found[0], QUERY}}

    def filled(text: str) -> str:
        for name, mark in marks.items():
            text = text.replace(mark, marked[name])
        return text

    try:
        own = [_text(one) for one in chosen.format_messages(llm, **{**marked, **marks})]
    except Exception:  # noqa: BLE001 - a template's own function may ask anything of a value
        own = []
    if [filled(text) for text in own] != texts:  # a function does something else with marks
        guard = marks[""] = _mark()
        marked[""] = ""
        own = [_guarded(text, (context, query), guard) for text in texts]
    question = str(values.get(QUERY, ""))
    instruction = ""
    for index, (text, words) in enumerate(zip(texts, own, strict=True)):
        if context not in text:
            rest = text.replace(query, question)
        elif index == len(texts) - 1 and query in text:
            instruction, rest = filled(without(words, (context, query))), question
        else:
            rest = filled(without(words, (context,))).replace(query, question)
        if rest != text:
            messages[index].blocks = [TextBlock(text=rest)]
    if instruction:
        first = int(bool(messages) and messages[0].role == MessageRole.SYSTEM)
        messages.insert(first, ChatMessage(role=MessageRole.SYSTEM, content=instruction))
    return [m for m in messages if m.role != MessageRole.SYSTEM or _text(m).strip()]


def checked_template(template: BasePromptTemplate, llm: LLM) -> BasePromptTemplate:
    """The template itself, if nothing of it or of a request would be lost."""
    if not isinstance(template, BasePromptTemplate):
        raise InputError(
            f"A template must be a PromptTemplate or ChatPromptTemplate, not "
            f"{type(template).__name__}; use PromptTemplate(text)."
        )
    chosen = _chosen(template, llm)
    functions = set(chosen.function_mappings or {})
    if "context_str" in functions:
        raise InputError(
            "The template rewrites context_str with a function, but passages become windows "
            "before there is a context_str. Change the nodes in a node postprocessor instead."
        )
    renamed = {new: old for old, new in (chosen.template_var_mappings or {}).items()}
    names = {renamed.get(name, name) for name in chosen.template_vars}
    for name, what in ((QUERY, "question"), ("context_str", "passages")):
        if name not in names or name in chosen.kwargs:
            raise InputError(
                f"The template has no open place for the {what}, which would be dropped; put "
                f"{{{name}}} where the {what} would stand in one prompt."
            )
    open_names = sorted(names - {"context_str", QUERY} - functions - set(chosen.kwargs))
    if open_names:
        raise InputError(
            f"The template has variables that nobody fills: {open_names}. Fill them with "
            "template.partial_format(...)."
        )
    return template


def _guarded(text: str, marks: Sequence[str], guard: str) -> str:
    """A text none of whose lines looks like a label or ruler, those with a mark alone left out."""
    return "\n".join(
        f"{guard}{line}" if line.strip() and line.strip() not in marks else line
        for line in text.split("\n")
    )


def without(text: str, marks: Sequence[str]) -> str:
    """Text with marks taken out, and what only framed them.

    A line goes that held nothing else but a label; so do rulers (lines without a letter or digit)
    around it, and a label at the end of the text ("Answer:").
    """
    kept: list[str | None] = []
    for line in text.split("\n"):
        bare = line
        for mark in marks:
            bare = bare.replace(mark, "")
        gone = bare != line and (not bare.strip() or _LABEL.fullmatch(bare.strip()))
        kept.append(None if gone else bare)
    for index in [i for i, line in enumerate(kept) if line is None]:
        for around in (range(index - 1, -1, -1), range(index + 1, len(kept))):
            near = next((i for i in around if (kept[i] or "").strip()), None)
            if near is not None and not any(map(str.isalnum, kept[near] or "")):
                kept[near] = None
    rest = [line for line in kept if line is not None]
    while rest and (not rest[-1].strip() or _LABEL.fullmatch(rest[-1].strip())):
        rest.pop()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(rest)).strip()


def _mark() -> str:
    return f"⟦{secrets.token_hex(16)}⟧"


def _text(message: ChatMessage) -> str:
    return message.content or ""


def _chosen(prompt: BasePromptTemplate, llm: LLM) -> BasePromptTemplate:
    return prompt.select(llm) if isinstance(prompt, SelectorPromptTemplate) else prompt
