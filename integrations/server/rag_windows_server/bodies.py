"""Reads a request of any route as one question; each field is used or refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rag_windows import InputError, Method, MissingExtraError, Passage, WindowedLM
from rag_windows.errors import require
from rag_windows.integration import (
    Penalties,
    Transcript,
    call_entry,
    check_citations,
    check_schema,
    guard_of,
    knows_variable,
    method_of,
    sampling_options,
)
from rag_windows_server import documents as docs
from rag_windows_server.errors import ApiError, missing, refused
from rag_windows_server.settings import Settings

Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that are refused: the values that change nothing here, and why no others are taken."""


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """One question.

    Attributes:
        messages: as `WindowedLM.generate` takes them, without the documents that they brought.
        passages: documents that came with the request.
        top_k: passages to retrieve from the server's own documents; 0 for none.
        method: how windows are read.
        options: further arguments of ``generate``, but for the seed and the penalties.
        seed: of the first answer; the next one has the next.
        penalties: for tokens that stand in the answer already: frequency, presence.
        tools, tool_choice, parallel: as `rag_windows.integration.AnswerReader` takes them; without
            ``parallel`` an answer makes one call at most.
        strict: the field that says that arguments of calls must be held to the tool's schema.
        template_kwargs: variables of the chat template, over the model's own.
        n: how many answers.
        user: whom the client asks for, for the log.
        param: the request's field with the messages, which errors name.
    """

    messages: list[dict[str, Any]]
    passages: list[Passage] = field(default_factory=list)
    top_k: int = 0
    method: Method
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    penalties: tuple[float, float] = (0.0, 0.0)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: Any = None
    parallel: bool = True
    strict: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    user: str | None = None
    param: str = "messages"

    def generate_options(self, index: int) -> dict[str, Any]:
        """The arguments of ``generate`` for one of the answers."""
        options = {**self.options, "method": self.method}
        if self.seed is not None:
            options["seed"] = self.seed + index
        if any(self.penalties):
            options["logits_processor"] = [Penalties(*self.penalties)]
        return options


class Retrieval(BaseModel):
    """``"rag": {"top_k": 16}``: retrieve so many passages from the server's documents."""

    model_config = ConfigDict(extra="forbid", strict=True)

    top_k: int = Field(ge=0)


class Body(BaseModel):
    """What the bodies of both routes have in common: our own fields, and sampling."""

    model_config = ConfigDict(extra="forbid", strict=True)

    refused: ClassVar[Refusals] = {}

    model: str
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    documents: list[str | dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    rag: Retrieval | None = None
    method: str | None = Field(default=None, max_length=200)
    rag_temperature: float | None = Field(default=None, gt=0)
    link_tokens: int | float | Literal["all"] | None = None
    link_choose: Literal["first", "deviation", "query", "last"] | None = None
    fallback: Literal["sequential"] | None = None
    citations: bool | str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ApiError(400, "The body must be a JSON object.", code="invalid_type")
        fields = dict(given)
        for name, (same, why) in cls.refused.items():
            value = fields.pop(name, None)
            if not any(type(one) is type(value) and one == value for one in (None, *same)):
                raise refused(name, why)
        return fields


def reading(body: Body, lm: WindowedLM, settings: Settings) -> tuple[Method, dict[str, Any]]:
    """How the windows are read, and ``generate``'s further option for it.

    Raises:
        ApiError: a field that the operator does not allow, or values out of range.
    """
    for name in ("method", "rag_temperature", "link_tokens", "fallback", "citations"):
        if getattr(body, name) is not None and name not in settings.allow:
            raise refused(name, "requests may not set it on this server. Leave it out.", "denied")
    if body.link_choose is not None and body.link_tokens is None:
        raise refused("link_choose", "it needs link_tokens beside it.", "invalid_value")
    numbers = {} if body.rag_temperature is None else {"temperature": body.rag_temperature}
    param = "method" if body.method is not None else "rag_temperature"
    try:
        method = method_of(lm.method if body.method is None else body.method, numbers)
        param = "link_tokens"
        method = method_of(
            method, link_tokens=body.link_tokens, link_choose=body.link_choose or "first"
        )
        param, options = "citations", {}
        if body.citations is not None:
            check_citations(body.citations, method)
            options["citations"] = body.citations
    except InputError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error
    guard = guard_of(body.fallback)
    return method, options if guard is None else {**options, "fallback": guard}


def new_tokens(asked: int | None, param: str, settings: Settings) -> int:
    """The largest number of tokens of an answer."""
    if asked is not None and asked > settings.most_new_tokens:
        why = f"{asked} is more than this server's {settings.most_new_tokens}."
        raise refused(param, why, "invalid_value")
    return settings.new_tokens if asked is None else asked


def user_of(body: Body) -> str | None:
    """The users whom a request names, if any."""
    return " ".join(filter(None, (body.safety_identifier, body.user))) or None


def sampling(body: Body) -> dict[str, Any]:
    """Options of ``generate`` for temperature and top_p."""
    return sampling_options(body.temperature, body.top_p)


def answer_form(form: Mapping[str, Any] | None, param: str, tools: bool) -> dict[str, Any]:
    """Options of ``generate`` that hold an answer to what ``response_format`` says.

    ``form`` is ``{"type": "text"}``, ``{"type": "json_object"}``, or ``{"type": "json_schema"}``
    with the schema under ``json_schema`` or next to the type.
    """
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return {}
    if kind not in ("json_object", "json_schema"):
        raise refused(f"{param}.type", "must be text, json_object or json_schema.", "invalid_value")
    if tools:
        why = "can't be combined with tools. Leave one of them out, or set tool_choice to none."
        raise refused(param, why)
    check_forms(param)
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        inner = form.get("json_schema", form)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            place = f"{param}.json_schema" if "json_schema" in form else param
            raise refused(f"{place}.schema", "must be an object.", "invalid_type")
    try:
        check_schema(schema)
    except InputError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error
    return {"json_schema": schema}


def check_forms(param: str) -> None:
    """Refuse a field that holds answers to a form where the package for it is missing."""
    try:
        require("An answer held to a schema or grammar", "llguidance", extra="structured")
    except MissingExtraError as error:
        raise missing(param, error) from error


_WORD = re.compile(r"[\w.:-]{1,64}", re.ASCII)
"""A text for a variable of the chat template, which trusts it: it can hold no markup."""


def template_kwargs(body: Body, lm: WindowedLM, settings: Settings) -> dict[str, Any]:
    """The variables of the chat template that a request sets, without its documents."""
    given = dict(body.chat_template_kwargs or {})
    given.pop("documents", None)
    for name, value in given.items():
        param = f"chat_template_kwargs.{name}"
        if "chat_template_kwargs" not in settings.allow:
            why = "requests may set nothing but documents there on this server. Leave it out."
            raise refused(param, why, "denied")
        if name == "chat_template" or not knows_variable(lm.tokenizer, lm.template_kwargs, name):
            why = "is no variable of this model's chat template. Leave it out."
            raise refused(param, why)
        plain = isinstance(value, bool | int | float) or value is None
        if not (plain or (isinstance(value, str) and _WORD.fullmatch(value))):
            why = "must be true, false, a number or one word."
            raise refused(param, why, "invalid_value")
    return given


def top_k(body: Body, brought: bool, retriever: object | None, settings: Settings) -> int:
    """How many passages to retrieve: as asked, or where the request brings none, as usual."""
    if body.rag is None:
        return 0 if brought or retriever is None else settings.top_k
    asked = body.rag.top_k
    if asked and retriever is None:
        raise refused("rag.top_k", "this server has no documents of its own. Send documents.")
    if asked and brought:
        raise refused("rag.top_k", "documents came with the request. Leave one of them out.")
    if asked > settings.most_top_k:
        why = f"{asked} is more than this server's {settings.most_top_k}."
        raise refused("rag.top_k", why, "invalid_value")
    return asked


_ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
_TEXT_PARTS = ("text", "input_text", "output_text")
_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "artifact", "refusal"}
_SILENT = {"annotations", "citations", "rag", "reasoning_content", "reasoning", "parsed"}
"""Fields of an earlier answer that clients send back, and that are ignored."""

_HINTS = {"cache_control"}
"""Fields that clients send to every server, ignored here: passages are always cached."""


def check_names(given: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    """Refuse keys of a request that are not known, unless their value is null."""
    for name in given.keys() - {*known, *_HINTS}:
        if given[name] is not None:
            raise refused(f"{place}.{name}", "is not known here.", "unknown_parameter")


def conversation_of(
    body: Body,
    given: Sequence[Mapping[str, Any]],
    settings: Settings,
    *,
    tools: bool,
    param: str = "messages",
    places: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], list[Passage]]:
    """Messages as ``generate`` takes them, and all documents of the request.

    ``given`` are its messages in the form of chat completions; ``places`` says where each of them
    stands in the request, if not at its place in ``param``.
    """
    found = Transcript()
    found.bring("documents", docs.passages_in(body.documents, "documents"))
    if (further := (body.chat_template_kwargs or {}).get("documents")) is not None:
        way = "chat_template_kwargs.documents"
        found.bring(way, docs.passages_in(further, way))
    for index, message in enumerate(given):
        _add(found, message, places[index] if places else f"{param}[{index}]", settings)
    if not (messages := found.conversation(tools=tools)):
        raise refused(param, "hold no question.", "invalid_value")
    return messages, docs.passages_of(found, settings.most_documents)


def _add(found: Transcript, message: Mapping[str, Any], place: str, settings: Settings) -> None:
    """Check one message, and add it and its documents to those found."""
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise refused(f"{place}.role", f"must be one of {', '.join(_ROLES)}.", "invalid_value")
    check_names(message, _MESSAGE | (_SILENT if role == "assistant" else set()), place)
    call_id, made = message.get("tool_call_id"), message.get("tool_calls")
    if not isinstance(call_id, str | None):
        raise refused(f"{place}.tool_call_id", "must be a text.", "invalid_type")
    if not isinstance(made, list | None):
        raise refused(f"{place}.tool_calls", "must be a list of calls.", "invalid_type")
    before = found.count()
    text = _text(message.get("content"), role, found, f"{place}.content")
    if (declined := message.get("refusal")) is not None:
        if role != "assistant" or not isinstance(declined, str):
            raise refused(f"{place}.refusal", "is the assistant's, and a text.")
        text += declined
    if role == "tool":
        passages = docs.passages_in(message.get("artifact"), f"{place}.artifact")
        found.bring("artifacts of tool messages", passages)
        text = "" if passages else text
    elif message.get("artifact") is not None or call_id is not None:
        raise refused(f"{place}.artifact", "belongs into messages of tools alone.")
    elif settings.parse_sources and role != "assistant":
        text, passages = docs.parse_sources(text)
        found.bring("<source> blocks", passages)
    if made and role != "assistant":
        raise refused(f"{place}.tool_calls", "belong into messages of the assistant alone.")
    found.add(
        role,
        text,
        brought=found.count() - before,
        calls=[_call(one, place) for one in made or ()],
        call_id=call_id,
        name=message.get("name"),
    )


def _call(given: object, place: str) -> dict[str, Any]:
    call: Any = given if isinstance(given, Mapping) else {}
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise refused(f"{place}.tool_calls", "must be calls of functions.")
    check_names(call, ("id", "type", "function", "index"), f"{place}.tool_calls[]")
    names = ("name", "arguments", "parsed_arguments")
    check_names(function, names, f"{place}.tool_calls[].function")
    return call_entry(str(function.get("name")), function.get("arguments"), call.get("id"))


def _text(content: object, role: str, found: Transcript, param: str) -> str:
    """What a message says; the documents among its parts are added to those found."""
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise refused(param, "must be a text or a list of parts.", "invalid_type")
    texts = []
    for index, part in enumerate(content):
        place = f"{param}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            check_names(part, ("type", "text", "annotations", "logprobs"), place)
            texts.append(part["text"])
        elif kind == "refusal" and role == "assistant":
            texts.append(str(part.get("refusal") or ""))
        elif kind in docs.PARTS and role == "user":
            found.bring("parts of messages", [docs.part_passage(part, place)])
        else:
            why = f"parts of type {kind!r} can't be read. Give text, or documents of the user."
            raise refused(place, why, "invalid_value")
    return "".join(texts)


def tools_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: object
) -> tuple[list[dict[str, Any]], Any, bool]:
    """Definitions of functions, which of them is to be called, and whether one is strict.

    Both are in the form of chat completions.
    """
    read: list[dict[str, Any]] = []
    strict = False
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            why = f"tools of type {tool.get('type')!r} can't be called here. Give functions."
            raise refused(f"tools[{index}]", why)
        check_names(tool, ("type", "function"), f"tools[{index}]")
        strict = strict or bool(function.get("strict"))
        shown = {name: value for name, value in function.items() if name != "strict"}
        read.append({"type": "function", "function": shown})
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if not isinstance(listed, list):
            raise refused("tool_choice.allowed_tools", "must list tools.", "invalid_type")
        names = {name for one in listed if isinstance(name := _name(one), str)}
        read = [tool for tool in read if tool["function"].get("name") in names]
        choice = allowed.get("mode", "auto")
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            raise refused("tool_choice", "must be auto, none, required or a function.")
        choice = {"type": "function", "function": {"name": _name(choice)}}
        if _name(choice) not in [tool["function"].get("name") for tool in read]:
            raise refused("tool_choice", "names no tool that the request brings.", "invalid_value")
    elif choice not in (None, "none", "auto", "required"):
        raise refused("tool_choice", "must be auto, none, required or a function.")
    if not read and choice not in (None, "none", "auto"):
        raise refused("tool_choice", "names no tool that the request brings.", "invalid_value")
    return ([] if choice == "none" else read), choice, strict and choice != "none"


def _name(tool: object) -> object:
    given: Any = tool if isinstance(tool, Mapping) else {}
    function = given.get("function")
    return function.get("name") if isinstance(function, Mapping) else given.get("name")
