"""``POST /v1/chat/completions``: bodies in, answers and streams out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from rag_windows import Passage
from rag_windows_server import bodies
from rag_windows_server.answering import ServedAnswer, StreamPiece
from rag_windows_server.bodies import Body, Refusals, ServerRequest
from rag_windows_server.errors import refused
from rag_windows_server.routes import Served, body_schema, event, new_id
from rag_windows_server.settings import Settings

Stop = Annotated[str, StringConstraints(min_length=1)]
_MOST_STOPS = 16
"""Each is searched for after every token."""
_MOST_DIGITS = 20


class StreamOptions(BaseModel):
    """What a stream reports besides the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ChatBody(Body):
    """The body of a chat completion; ``refused`` are OpenAI's further fields."""

    refused: ClassVar[Refusals] = {
        "audio": ((), "answers are text alone. Leave it out."),
        "function_call": ((), "is deprecated. Use tool_choice."),
        "functions": ((), "is deprecated. Use tools."),
        "metadata": (({},), "answers are not stored. Leave it out, or name a user."),
        "modalities": ((["text"],), "answers are text alone."),
        "moderation": ((), "nothing is moderated here. Leave it out."),
        "prediction": ((), "predicted outputs are not used here. Leave it out."),
        "prompt_cache_key": ((), "passages are found in the cache by their text. Leave it out."),
        "prompt_cache_options": ((), "the cache is the operator's to set. Leave it out."),
        "prompt_cache_retention": ((), "the cache is the operator's to set. Leave it out."),
        "reasoning_effort": ((), "it can't be set for this model. Leave it out."),
        "store": ((False,), "answers are not stored. Leave it out."),
        "verbosity": ((), "it can't be set for this model. Ask for it in the messages."),
        "web_search_options": ((), "nothing is searched on the web. Send documents."),
    }

    messages: list[dict[str, Any]] = Field(min_length=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1)
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


def read(body: ChatBody, served: Served) -> ServerRequest:
    """A body as a question; ApiError where something in it is refused."""
    settings, lm = served.settings, served.lm
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "belong to a stream. Set stream.", "invalid_value")
    most, named = body.max_completion_tokens, "max_completion_tokens"
    if body.max_tokens is not None:
        if most not in (None, body.max_tokens):
            why = "differs from max_completion_tokens. Leave it out."
            raise refused("max_tokens", why, "invalid_value")
        most, named = body.max_tokens, "max_tokens"
    n = body.n or 1
    if n > settings.most_choices:
        raise refused("n", f"{n} is more than {settings.most_choices}.", "invalid_value")
    tools, choice, strict = bodies.tools_of(body.tools, body.tool_choice)
    if body.parallel_tool_calls is not None and not body.tools:
        raise refused("parallel_tool_calls", "belongs to tools.", "invalid_value")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs. Set it.", "invalid_value")
    messages, passages = conversation(body, settings, tools=bool(tools))
    method, options = bodies.reading(body, lm, settings)
    options |= bodies.sampling(body)
    options |= bodies.answer_form(body.response_format, "response_format", bool(tools))
    options["max_new_tokens"] = bodies.new_tokens(most, named, settings)
    if body.stop:
        options["stop"] = body.stop
    if body.logprobs:
        options |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.logit_bias:
        options["sequence_bias"] = _bias(body.logit_bias, served)
    return ServerRequest(
        messages=messages,
        passages=passages,
        top_k=bodies.top_k(body, bool(passages), served.answering.retriever, settings),
        method=method,
        options=options,
        seed=body.seed,
        penalties=(body.frequency_penalty or 0.0, body.presence_penalty or 0.0),
        tools=tools,
        tool_choice=choice,
        parallel=body.parallel_tool_calls is not False,
        strict="tools[].function.strict" if strict else None,
        template_kwargs=bodies.template_kwargs(body, lm, settings),
        n=n,
        user=bodies.user_of(body),
    )


def conversation(
    body: ChatBody, settings: Settings, *, tools: bool
) -> tuple[list[dict[str, Any]], list[Passage]]:
    """The messages without the documents that they bring, and these."""
    return bodies.conversation_of(body, body.messages, settings, tools=tools)


def _bias(given: Mapping[str, float], served: Served) -> list[list[Any]]:
    vocabulary = len(served.lm.tokenizer)
    for token, bias in given.items():
        # Python reads no number of thousands of digits.
        digits = token.isdecimal() and token.isascii() and len(token) <= _MOST_DIGITS
        if not (digits and int(token) < vocabulary):
            raise refused("logit_bias", f"{token!r:.20} is no token's id.", "invalid_value")
        if not -100 <= bias <= 100:
            raise refused("logit_bias", "values must be from -100 to 100.", "invalid_value")
    return [[[int(token)], float(bias)] for token, bias in given.items()]


def usage(answers: Sequence[ServedAnswer]) -> dict[str, Any]:
    """Tokens of a request: its prompt once, and all of its answers."""
    first = answers[0].generation.usage
    written = sum(one.generation.usage.completion_tokens for one in answers)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": first.prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.generation.usage.reasoning_tokens for one in answers)
        },
    }


def _annotations(answered: ServedAnswer) -> list[dict[str, Any]]:
    return [{"type": "url_citation", "url_citation": one} for one in answered.annotations]


def _logprobs(answered: ServedAnswer) -> dict[str, Any] | None:
    return None if answered.logprobs is None else {"content": answered.logprobs, "refusal": None}


class ChatShape:
    """Answers to one request in OpenAI's form."""

    def __init__(self, body: ChatBody, served: Served) -> None:
        self._head = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": served.settings.model_name,
            "system_fingerprint": served.fingerprint,
        }
        if body.service_tier is not None:
            self._head["service_tier"] = "default"
        self._usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    def whole(self, answers: Sequence[ServedAnswer]) -> ChatCompletion:
        """All answers at once."""
        return ChatCompletion.model_validate(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [self._choice(one) for one in answers],
                "usage": usage(answers),
            }
        )

    def _choice(self, answered: ServedAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answered.text if answered.text or not answered.calls else None,
            "refusal": None,
            "annotations": _annotations(answered),
            "citations": answered.citations,
            "rag": answered.rag,
        }
        if answered.calls:
            message["tool_calls"] = answered.calls
        if answered.reasoning:
            message["reasoning_content"] = answered.reasoning
        return {
            "index": answered.index,
            "message": message,
            "finish_reason": answered.finish_reason,
            "logprobs": _logprobs(answered),
        }

    async def stream(self, pieces: AsyncGenerator[StreamPiece, None]) -> AsyncGenerator[str, None]:
        """Events of a stream; what is known at the end comes with the last delta of an answer."""
        answers: list[ServedAnswer] = []
        begun: set[int] = set()
        async for piece in pieces:
            delta: dict[str, Any] = {}
            if piece.index not in begun:
                begun.add(piece.index)
                delta["role"] = "assistant"
            if piece.text or (delta and not piece.reasoning):
                delta["content"] = piece.text
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            choice: dict[str, Any] = {"index": piece.index, "delta": delta, "finish_reason": None}
            if (answered := piece.answered) is not None:
                answers.append(answered)
                choice |= {
                    "finish_reason": answered.finish_reason,
                    "logprobs": _logprobs(answered),
                }
                delta |= {
                    "annotations": _annotations(answered),
                    "citations": answered.citations,
                    "rag": answered.rag,
                }
                if answered.calls:
                    calls = enumerate(answered.calls)
                    delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
            yield self._event([choice], None)
        if self._usage:
            yield self._event([], usage(sorted(answers, key=lambda one: one.index)))
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], counted: dict[str, Any] | None) -> str:
        data = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._usage:
            data["usage"] = counted
        return event(ChatCompletionChunk.model_validate(data))


def routes(served: Served) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["answers"])

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation over documents",
        openapi_extra=body_schema(ChatBody),
        response_model=None,
    )
    async def complete(request: Request) -> Response:
        return await served.answered(
            request, ChatBody, read, lambda body, _question, _request_id: ChatShape(body, served)
        )

    return router
