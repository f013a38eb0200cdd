"""Calls of tools as models write them: how a template has them, forced, and read from answers.

transformers' response parser finds the calls; what is in them is checked here.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError
from pydantic import ValidationError
from pydantic_core import from_json

from rag_windows.errors import PromptError, ToolsUnsupportedError
from rag_windows.prompt.answer_form import alike, available, call_grammar
from rag_windows.prompt.conversation import Conversation, ToolCall, check_tools, malformed
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.prompt.reasoning import ReasoningFormat
from rag_windows.results import Generation

_NAME, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe_value", "probe_result"
_SAID = "\ue000probe\ue001"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string"}}}
_FUNCTION = {"name": _NAME, "description": "A probe.", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
# Nine letters and digits: the form of id that Mistral's templates insist on.
_ID = "abc123def"
_CALLED = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_USER = {"role": "user", "content": "probe"}
_CALL = {"role": "assistant", "content": "", "tool_calls": [_CALLED]}
_ANSWER = {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": _ID}
_ADVICE = (
    "Use a model whose chat template supports tools, or pass the documents without tools; "
    "documents need none."
)
_WRITTEN = re.compile(
    rf'((?:\[\s*)?\{{\s*"name":\s*"){_NAME}(",\s*"(?:arguments|parameters)":)'
    rf'\s*\{{\s*"{_KEY}":\s*"{_VALUE}"\s*\}}[^]}}]*\}}(?:\s*\])?'
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a chat template writes calls: as JSON, bare or between the markers `begin` and `end`.

    A call begins with `opening`, then come the tool's name and `middle`. `opening` is None where
    each answer begins with reasoning, so that no call can be forced.
    """

    begin: str
    end: str
    opening: str | None
    middle: str

    @classmethod
    def of(cls, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ToolFormat:
        """Try a chat template with a tool, a call and a result; ToolsUnsupportedError otherwise."""
        if getattr(tokenizer, "chat_template", None) is None:
            raise ToolsUnsupportedError(f"This model has no chat template. {_ADVICE}")

        def render(*messages: Mapping[str, Any], prompt: bool = False) -> str:
            options = {"tools": _TOOLS, "add_generation_prompt": prompt, **template_kwargs}
            return str(tokenizer.apply_chat_template([*messages], tokenize=False, **options))

        try:
            shown = render(_USER, prompt=True)
            _check_shown("the tools", _NAME, shown)
            said = render(_USER, {"role": "assistant", "content": _SAID})
            called = render(_USER, _CALL)
            _check_shown("tool calls", _VALUE, called)
            _check_shown("the tools' answers", _RESULT, render(_USER, _CALL, _ANSWER))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ToolsUnsupportedError(
                f"This model's chat template refuses a tool call: {error}. {_ADVICE}"
            ) from error
        before, _, after = said.partition(_SAID)
        # What the template writes in place of an assistant's text when there is a call.
        written = called[alike(before, called) :]
        written = written[: len(written) - alike(after[::-1], written[::-1])]
        head = _WRITTEN.search(written)
        if head is None:
            raise ToolsUnsupportedError(
                "This model's chat template writes tool calls in an unknown form. It must be "
                f'JSON such as {{"name": ..., "arguments": {{...}}}}. {_ADVICE}'
            )
        begin, end = written[: head.start()], written[head.end() :]
        reasoning = ReasoningFormat.of(tokenizer, template_kwargs)
        thinks = reasoning is not None and reasoning.after(shown).parts().thought
        opening = None if thinks else begin.lstrip() + head[1]
        return cls(begin.strip(), end.strip(), opening, head[2])

    @property
    def response_template(self) -> dict[str, Any]:
        """For transformers' response parser; the names are its own."""
        joined = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
        calls = {"content": "text", "repeats": True}
        calls["open_pattern"] = rf"\s*{re.escape(self.begin)}" if self.begin else r"\A\s*(?=[\[{])"
        if self.end:
            calls["close"] = self.end
        return {
            "start_anchor_pattern": r"\A",
            "fields": {"tool_calls": calls, "content": joined},
        }


def _check_shown(what: str, probe: str, rendered: str) -> None:
    if probe not in rendered:
        raise ToolsUnsupportedError(f"This model's chat template does not show {what}. {_ADVICE}")


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call that can't be used: what the model wrote, and what is wrong with it."""

    text: str
    error: str


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer in parts.

    Attributes:
        text: what is for the user; while streaming, what was not fed out before.
        reasoning: what the model thought aloud.
        calls: of tools, in order, each with a new id of nine letters.
        broken: calls that can't be used.
    """

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()


class AnswerReader:
    """Puts the tools of one request into its query and reads the calls out of its answer.

    The answer's reasoning is `Generation.reasoning`, and that of a stream `Chunk.reasoning`, with
    and without tools. Without tools, query and text pass through. `forced` names tools
    of which one is to be called. Not for several threads at once.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        form: ToolFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        forced: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._tools = tools
        self._forced = forced
        self._opening = ""
        self._markers: set[int] = set()
        if form is not None:
            if forced:
                if form.opening is None:
                    raise ToolsUnsupportedError(
                        "A tool call can't be forced with this model, because its answers begin "
                        "with reasoning. Leave tool_choice out, or try "
                        "template_kwargs={'enable_thinking': False}."
                    )
                named = f"{forced[0]}{form.middle}" if len(forced) == 1 else ""
                self._opening = form.opening + named
            written = form.begin + form.end
            added = tokenizer.added_tokens_decoder.items()
            special = {id_: str(token) for id_, token in added if token.special}
            self._markers = {id_ for id_, token in special.items() if token in written}
        self._restart()

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        choice: Any = None,
    ) -> AnswerReader:
        """A reader for one request.

        As a `choice`, None, False or "auto" force no call; "any", "required" or True force one; a
        tool's name, or OpenAI's ``{"type": "function", "function": {"name": ...}}``, forces that
        one. With "none", the tools are not shown.

        Raises:
            ToolsUnsupportedError: the template shows no tools, its calls can't be read, or forced.
        """
        if not tools or choice == "none":
            return cls()
        checked = check_tools(tools)
        names = [tool["function"]["name"] for tool in checked]
        form = ToolFormat.of(tokenizer, template_kwargs)
        if choice in (None, False, "auto"):
            return cls(tokenizer, form, checked)
        if choice in (True, "any", "required"):
            return cls(tokenizer, form, checked, names)
        named = choice.get("function") if isinstance(choice, Mapping) else {"name": choice}
        name = named.get("name") if isinstance(named, Mapping) else None
        if name not in names:
            raise PromptError(
                f"tool_choice names no known tool. Use one of {names}, 'auto', 'any' or 'none'."
            )
        return cls(tokenizer, form, checked, [str(name)])

    def grammar(self) -> str | None:
        """For ``generate``: what holds a forced call to its tool's schema.

        None where no call is forced, where a schema says what can't be held to, or without the
        extra ``structured``.
        """
        form, forced = self._form, self._forced
        if form is None or not forced or not available():
            return None
        functions = [tool["function"] for tool in self._tools]
        schemas = {one["name"]: one.get("parameters") or {} for one in functions}
        calls = {f"{name}{form.middle}": schemas[name] for name in forced}
        if len(forced) == 1:
            calls = {"": schemas[forced[0]]}
        listed = self._opening.removeprefix(form.begin).lstrip().startswith("[")
        return call_grammar(calls, "}]" if listed else "}")

    def query(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """The query for the engine; messages and variables as `Conversation.of` takes them."""
        return Conversation.of(
            messages,
            tools=self._tools,
            opening=self._opening,
            template_kwargs=template_kwargs,
        )

    def feed(self, text: str) -> str:
        """Take a chunk of a stream; give what of it is text and no call, nor may become one.

        Where markers of calls are special tokens, which the text lacks, all of it comes at the end.
        """
        if self._form is None:
            return text
        return "" if self._markers else _text(self._parser.feed(text))

    def last(self, generation: Generation) -> ToolAnswer:
        """The end of a stream whose chunks were all fed: the rest of the text, and the calls."""
        form = self._form
        if form is None:
            return ToolAnswer("", generation.reasoning)
        shown = _text(self._parser.feed(self._decode(generation))) if self._markers else ""
        message, events = self._parser.finalize()
        shown += _text(events)
        calls: list[ToolCall] = []
        broken: list[BrokenCall] = []
        for written in message.get("tool_calls", ()):
            try:
                calls += _calls(written)
            except PromptError as error:
                broken.append(BrokenCall(written, str(error)))
        if not form.begin and broken and not self._opening:
            return ToolAnswer(generation.text, generation.reasoning)
        rest = shown if shown.strip() or not (calls or broken) else ""
        return ToolAnswer(rest, generation.reasoning, tuple(calls), tuple(broken))

    def whole(self, generation: Generation) -> ToolAnswer:
        """An answer of which nothing was fed; one of several, where there are alternatives."""
        self._restart()
        shown = self.feed(generation.text)
        rest = self.last(generation)
        return replace(rest, text=shown + rest.text)

    def _restart(self) -> None:
        if self._form is not None:
            self._parser = self._tokenizer.get_response_parser(
                self._form.response_template, prefix=self._opening
            )

    def _decode(self, generation: Generation) -> str:
        """The answer's text with the markers of calls in it, cut where the generation was."""
        ids = generation.token_ids[generation.usage.reasoning_tokens :]
        text = Detokenizer(self._tokenizer, self._markers).text(ids)
        plain = Detokenizer(self._tokenizer).text(ids)
        if generation.usage.reasoning_tokens:
            text, plain = text.lstrip(), plain.lstrip()
        if plain.startswith(generation.text):
            text = text.removesuffix(plain[len(generation.text) :])
        return text


def _calls(written: str) -> list[ToolCall]:
    """The calls in one region of an answer; PromptError where it holds something else."""
    try:
        value = from_json(written)
    except ValueError as error:
        raise PromptError(f"The model wrote a tool call that is not valid JSON: {error}") from error
    calls = []
    for one in value if isinstance(value, list) else [value]:
        given = one if isinstance(one, dict) else {}
        arguments = given.get("arguments", given.get("parameters"))
        function = {"name": given.get("name", one), "arguments": arguments}
        identity = "".join(secrets.choice(string.ascii_letters) for _ in _ID)
        try:
            calls.append(ToolCall.model_validate({"id": identity, "function": function}))
        except ValidationError as error:
            raise malformed("The model's tool call", error) from error
    return calls


def _text(events: Sequence[Mapping[str, Any]]) -> str:
    """The text for the user in what the parser found."""
    found = (one for one in events if one["field"] == "content")
    return "".join(one["text"] for one in found if one["type"] == "region_chunk")
