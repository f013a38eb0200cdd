"""``POST /v1/responses``: bodies in, answers and streams out."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse
from openai.types import responses as types
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel, ConfigDict, Field

from rag_windows import Passage
from rag_windows_server import bodies, errors
from rag_windows_server.answering import ServedAnswer, StreamPiece
from rag_windows_server.bodies import Body, Refusals, ServerRequest
from rag_windows_server.errors import ApiError, refused
from rag_windows_server.routes import Served, body_schema, event
from rag_windows_server.settings import Settings

_LOGPROBS = "message.output_text.logprobs"


class TextForm(BaseModel):
    """Which form the text of an answer has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Obfuscation(BaseModel):
    """Whether a stream has random letters besides the text: never."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """The body of a response; ``refused`` are OpenAI's further fields.

    Both penalties are Open Responses' own.
    """

    refused: ClassVar[Refusals] = {
        "background": ((False,), "answers are given at once. Leave it out."),
        "context_management": (([],), "conversations are not shortened here. Leave it out."),
        "conversation": ((), "nothing is stored. Send the conversation as input."),
        "max_tool_calls": ((), "limits OpenAI's own tools, which are not here. Leave it out."),
        "moderation": ((), "nothing is moderated here. Leave it out."),
        "previous_response_id": ((), "answers are not stored. Send the conversation as input."),
        "prompt": ((), "no prompts are stored here. Send instructions and input."),
        "prompt_cache_key": ((), "passages are found in the cache by their text. Leave it out."),
        "prompt_cache_options": ((), "the cache is the operator's to set. Leave it out."),
        "prompt_cache_retention": ((), "the cache is the operator's to set. Leave it out."),
        "reasoning": (({},), "it can't be set for this model. Leave it out."),
        "store": ((False,), "answers are not stored. Leave it out."),
        "truncation": (("disabled",), "conversations are not shortened here. Send less."),
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    include: list[str] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    stream_options: Obfuscation | None = None
    text: TextForm | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


def read(body: ResponsesBody, served: Served) -> ServerRequest:
    """A body as a question; ApiError where something in it is refused."""
    settings, lm = served.settings, served.lm
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "belong to a stream. Set stream.", "invalid_value")
    for index, name in enumerate(body.include or ()):
        if name != _LOGPROBS:
            why = f"{name!r:.60} can't be given here; {_LOGPROBS} can. Leave it out."
            raise refused(f"include[{index}]", why)
    text = body.text or TextForm()
    if text.verbosity is not None:
        why = "it can't be set for this model. Ask for it in the instructions."
        raise refused("text.verbosity", why)
    definitions = [_definition(tool, f"tools[{index}]") for index, tool in _numbered(body.tools)]
    tools, choice, strict = bodies.tools_of(definitions, body.tool_choice)
    messages, passages = conversation(body, settings, tools=bool(tools))
    method, options = bodies.reading(body, lm, settings)
    options |= bodies.sampling(body)
    options |= bodies.answer_form(text.format, "text.format", bool(tools))
    options["max_new_tokens"] = bodies.new_tokens(
        body.max_output_tokens, "max_output_tokens", settings
    )
    if body.include or body.top_logprobs:
        options |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return ServerRequest(
        messages=messages,
        passages=passages,
        top_k=bodies.top_k(body, bool(passages), served.answering.retriever, settings),
        method=method,
        options=options,
        penalties=(body.frequency_penalty or 0.0, body.presence_penalty or 0.0),
        tools=tools,
        tool_choice=choice,
        parallel=body.parallel_tool_calls is not False,
        strict="tools[].strict" if strict else None,
        template_kwargs=bodies.template_kwargs(body, lm, settings),
        user=bodies.user_of(body),
        param="input",
    )


def _numbered(given: Sequence[Any] | None) -> Iterator[tuple[int, Any]]:
    return enumerate(given or ())


_FUNCTION = ("name", "description", "parameters", "strict")


def _definition(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A function in the form of chat completions; other tools as they are, for their refusal."""
    if tool.get("type") != "function":
        return dict(tool)
    bodies.check_names(tool, ("type", *_FUNCTION), place)
    function = {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}
    return {"type": "function", "function": function}


def conversation(
    body: ResponsesBody, settings: Settings, *, tools: bool
) -> tuple[list[dict[str, Any]], list[Passage]]:
    """The messages without the documents that they bring, and these."""
    given, places = _turns(body)
    return bodies.conversation_of(body, given, settings, tools=tools, param="input", places=places)


def _turns(body: ResponsesBody) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages in the form of chat completions, and where each one stands in the body."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
        places.append("instructions")
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}], [*places, "input"]
    for index, item in enumerate(body.input):
        place = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append(_message(item, place))
        elif kind == "function_call":
            call = _call(item, place)
            if messages and messages[-1]["role"] == "assistant":
                # One turn of the model: what it said before a call, or another call.
                messages[-1].setdefault("tool_calls", []).append(call)
                continue
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append(_result(item, place))
        elif kind == "reasoning":
            # Of a turn that is over: chat templates leave it out, too.
            bodies.check_names(item, ("type", "id", "summary", "content", "status"), place)
            continue
        else:
            why = (
                f"items of type {kind!r:.60} can't be read. Send messages, calls of functions and "
                "their outputs."
            )
            raise refused(f"{place}.type", why, "invalid_value")
        places.append(place)
    return messages, places


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    # An earlier answer comes back with all that it had.
    bodies.check_names(item, ("type", "id", "status", "phase", "role", "content"), place)
    message = {"role": item.get("role"), "content": item.get("content")}
    if message["role"] == "tool":
        why = "must not be tool. Send an item of type function_call_output."
        raise refused(f"{place}.role", why, "invalid_value")
    return message


def _text_of(item: Mapping[str, Any], name: str, place: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise refused(f"{place}.{name}", "must be a text.", "invalid_type")
    return text


def _call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    bodies.check_names(item, ("type", "id", "status", "call_id", "name", "arguments"), place)
    names = ("name", "arguments")
    function = {name: _text_of(item, name, place) for name in names}
    return {"type": "function", "id": _text_of(item, "call_id", place), "function": function}


def _result(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    bodies.check_names(item, ("type", "id", "status", "call_id", "output", "artifact"), place)
    output = item.get("output")
    if isinstance(output, list):
        for index, part in enumerate(output):
            if not isinstance(part, Mapping) or part.get("type") != "input_text":
                why = "only texts can be read. Give parts of type input_text."
                raise refused(f"{place}.output[{index}]", why, "invalid_value")
            bodies.check_names(part, ("type", "text"), f"{place}.output[{index}]")
    else:
        output = _text_of(item, "output", place)
    call_id = _text_of(item, "call_id", place)
    result = {"role": "tool", "tool_call_id": call_id, "content": output}
    artifact = item.get("artifact")
    return result if artifact is None else {**result, "artifact": artifact}


def _new_id(kind: str) -> str:
    # Clients know the kind of an id by its beginning, up to the underscore.
    return f"{kind}_{secrets.token_hex(12)}"


def _usage(answered: ServedAnswer) -> types.ResponseUsage:
    usage = answered.generation.usage
    # OpenAI's cache_write_tokens are not counted here, and a number that is made up is not sent.
    return types.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails.model_construct(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


class _Response(types.Response):
    # Whole seconds, as OpenAI sends them; its Python types read them as float.
    created_at: int
    completed_at: int | None = None


class ResponsesShape:
    """The answer to one request in OpenAI's form."""

    def __init__(
        self, body: ResponsesBody, question: ServerRequest, request_id: str, served: Served
    ) -> None:
        self._request_id = request_id
        self._sequence_number = 0
        settings = served.settings
        config: Any = served.lm.model.generation_config
        options = question.options
        sampled = options.get("do_sample", config.do_sample)
        temperature = options.get("temperature", config.temperature) if sampled else 0.0
        top_p = options.get("top_p", config.top_p) if sampled else 1.0
        form = None if body.text is None else body.text.format
        self._head: dict[str, Any] = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": settings.model_name,
            "output": [],
            "parallel_tool_calls": question.parallel,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": None,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [
                {"description": None, "parameters": None, "strict": False, **tool}
                for tool in body.tools or ()
            ],
            "top_logprobs": body.top_logprobs or 0,
            "temperature": 1.0 if temperature is None else temperature,
            "top_p": 1.0 if top_p is None else top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "background": False,
            "store": False,
            "frequency_penalty": question.penalties[0],
            "presence_penalty": question.penalties[1],
        }

    def whole(self, answers: Sequence[ServedAnswer]) -> types.Response:
        """The answer at once; this route has one."""
        (answered,) = answers
        return self._answer(answered, _items(answered, answered.text))

    def _answer(self, answered: ServedAnswer, output: list[dict[str, Any]]) -> types.Response:
        cut = answered.finish_reason == "length"
        return self._response(
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=output,
            usage=_usage(answered),
            citations=answered.citations,
            rag=answered.rag,
        )

    def _response(self, **fields: Any) -> types.Response:
        return _Response.model_validate({**self._head, **fields})

    async def stream(self, pieces: AsyncGenerator[StreamPiece, None]) -> AsyncGenerator[str, None]:
        """Events of a stream; one that fails ends with ``response.failed``."""
        begun = self._response()
        yield self._event(types.ResponseCreatedEvent, response=begun)
        yield self._event(types.ResponseInProgressEvent, response=begun)
        thought: dict[str, Any] | None = None
        item: dict[str, Any] | None = None
        reasoning = text = ""
        try:
            async for piece in pieces:
                reasoning += piece.reasoning
                text += piece.text
                if piece.reasoning:
                    if thought is None:
                        thought = _reasoning_item("", "in_progress")
                        for one in self._opened(thought, 0):
                            yield one
                    yield self._delta(thought, 0, piece.reasoning)
                if piece.answered is not None:
                    for one in self._ended(piece.answered, text, piece.text, item, thought):
                        yield one
                    continue
                if piece.text and item is None:
                    if thought is not None:
                        for one in self._reasoned(
                            _reasoning_item(reasoning, "completed", thought["id"])
                        ):
                            yield one
                    item = _message_item("", "in_progress")
                    for one in self._opened(item, int(thought is not None)):
                        yield one
                if piece.text and item is not None:
                    yield self._delta(item, int(thought is not None), piece.text)
        except Exception as error:  # noqa: BLE001 - reported to the client, and logged
            failure = errors.answered(error, self._request_id)
            output = []
            if thought is not None:
                status = "incomplete" if item is None else "completed"
                output.append(_reasoning_item(reasoning, status, thought["id"]))
            if item is not None:
                output.append(_message_item(text, "incomplete", item["id"]))
            for one in self._failed(failure, output):
                yield one
        # Open Responses asks for it; OpenAI's own clients stop at it.
        yield "data: [DONE]\n\n"

    def _ended(
        self,
        answered: ServedAnswer,
        text: str,
        last: str,
        begun: dict[str, Any] | None,
        thought: dict[str, Any] | None,
    ) -> Iterator[str]:
        """The last events, when the answer is complete.

        ``begun`` is the message whose text was streamed, but for its ``last`` piece; ``thought`` is
        the item of the reasoning, which ended when the message began.
        """
        output = _items(answered, text, begun, thought)
        for index, item in enumerate(output):
            if item["type"] == "message":
                if begun is None:
                    yield from self._opened(item, index)
                if last:
                    yield self._delta(item, index, last)
                yield from self._closed(item, index)
            elif item["type"] == "reasoning":
                if begun is None:
                    yield from self._reasoned(item)
            else:
                yield from self._called(item, index)
        kind: type[BaseModel] = types.ResponseCompletedEvent
        if answered.finish_reason == "length":
            kind = types.ResponseIncompleteEvent
        yield self._event(kind, response=self._answer(answered, output))

    def _failed(self, error: ApiError, output: list[dict[str, Any]]) -> Iterator[str]:
        details = error.error
        names = ("message", "code", "param")
        flat = {name: details[name] for name in names}
        # OpenAI's clients raise what stands under this name, and ignore the rest.
        yield self._event(types.ResponseErrorEvent, **flat, error=details)
        # The type of a response knows only a few codes; the event before it has ours.
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        failure = {"code": code, "message": details["message"]}
        failed = self._response(status="failed", error=failure, output=output)
        yield self._event(types.ResponseFailedEvent, response=failed)

    def _event(self, kind: type[BaseModel], **fields: Any) -> str:
        (name,) = get_args(kind.model_fields["type"].annotation)
        data = {**fields, "type": name, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return event(kind.model_validate(data), name)

    def _opened(self, item: dict[str, Any], index: int) -> Iterator[str]:
        begun = {**item, "content": [], "status": "in_progress"}
        yield self._event(types.ResponseOutputItemAddedEvent, item=begun, output_index=index)
        empty = {**item["content"][0], "text": ""}
        if item["type"] == "message":
            empty |= {"annotations": [], "logprobs": []}
        yield self._event(
            types.ResponseContentPartAddedEvent, part=empty, **_place(item, index, content=True)
        )

    def _delta(self, item: dict[str, Any], index: int, text: str) -> str:
        place = _place(item, index, content=True)
        if item["type"] == "reasoning":
            return self._event(types.ResponseReasoningTextDeltaEvent, delta=text, **place)
        return self._event(types.ResponseTextDeltaEvent, delta=text, logprobs=[], **place)

    def _closed(self, item: dict[str, Any], index: int) -> Iterator[str]:
        place = _place(item, index, content=True)
        (part,) = item["content"]
        for number, annotation in enumerate(part["annotations"]):
            yield self._event(
                types.ResponseOutputTextAnnotationAddedEvent,
                annotation=annotation,
                annotation_index=number,
                **place,
            )
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event(types.ResponseTextDoneEvent, **text, **place)
        yield self._event(types.ResponseContentPartDoneEvent, part=part, **place)
        yield self._event(types.ResponseOutputItemDoneEvent, item=item, output_index=index)

    def _reasoned(self, item: dict[str, Any]) -> Iterator[str]:
        place = _place(item, 0, content=True)
        (part,) = item["content"]
        yield self._event(types.ResponseReasoningTextDoneEvent, text=part["text"], **place)
        yield self._event(types.ResponseContentPartDoneEvent, part=part, **place)
        yield self._event(types.ResponseOutputItemDoneEvent, item=item, output_index=0)

    def _called(self, item: dict[str, Any], index: int) -> Iterator[str]:
        place, arguments = _place(item, index), item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event(types.ResponseOutputItemAddedEvent, item=begun, output_index=index)
        yield self._event(types.ResponseFunctionCallArgumentsDeltaEvent, delta=arguments, **place)
        done = {"arguments": arguments, "name": item["name"]}
        yield self._event(types.ResponseFunctionCallArgumentsDoneEvent, **done, **place)
        yield self._event(types.ResponseOutputItemDoneEvent, item=item, output_index=index)


def _place(item: dict[str, Any], index: int, content: bool = False) -> dict[str, Any]:
    place = {"item_id": item["id"], "output_index": index}
    return {**place, "content_index": 0} if content else place


def _message_item(text: str, status: str, identity: str | None = None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": identity or _new_id("msg"),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def _reasoning_item(text: str, status: str, identity: str | None = None) -> dict[str, Any]:
    return {
        "id": identity or _new_id("rs"),
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def _items(
    answered: ServedAnswer,
    text: str,
    begun: dict[str, Any] | None = None,
    thought: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The items of an answer: reasoning, message, calls.

    ``begun`` and ``thought`` are those of a stream that were begun already.
    """
    items: list[dict[str, Any]] = []
    if answered.reasoning:
        # With no text behind it, an answer that was cut was cut within the reasoning.
        cut = answered.finish_reason == "length" and not text
        identity = None if thought is None else thought["id"]
        status = "incomplete" if cut else "completed"
        items.append(_reasoning_item(answered.reasoning, status, identity))
    if text or not (answered.calls or answered.reasoning):
        status = "incomplete" if answered.finish_reason == "length" else "completed"
        message = _message_item(text, status, None if begun is None else begun["id"])
        message["content"][0] |= {
            "annotations": [{"type": "url_citation", **one} for one in answered.annotations],
            "logprobs": [_logprob(one) for one in answered.logprobs or ()],
        }
        items.append(message)
    for call in answered.calls:
        items.append(
            {
                "id": _new_id("fc"),
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    return items


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    # The type of a response wants a list of bytes where chat completions have None.
    logprob = {**entry, "bytes": entry["bytes"] or []}
    if "top_logprobs" in entry:
        logprob["top_logprobs"] = [_logprob(one) for one in entry["top_logprobs"]]
    return logprob


def routes(served: Served) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["answers"])

    @router.post(
        "/v1/responses",
        summary="Answer a conversation over documents, item by item",
        openapi_extra=body_schema(ResponsesBody),
        response_model=None,
    )
    async def respond(request: Request) -> HttpResponse:
        return await served.answered(
            request,
            ResponsesBody,
            read,
            lambda body, question, request_id: ResponsesShape(body, question, request_id, served),
        )

    return router
