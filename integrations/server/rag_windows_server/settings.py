"""What the operator of a server allows, and the limits of a request."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

PerRequest = Literal[
    "method", "rag_temperature", "link_tokens", "fallback", "citations", "chat_template_kwargs"
]


class Settings(BaseModel):
    """What requests may ask for, and how much of it.

    Attributes:
        model_name: as ``GET /v1/models`` lists it and requests name it.
        model_aliases: further names of it that requests may use.
        system: instruction before every request's own, or None.
        default_system: instruction of requests without any that the server's own documents answer;
            it stands behind the chat template's own system message.
        top_k: passages that are retrieved where the server has documents and a request neither
            brings any nor says how many.
        most_top_k: the most that a request may ask for.
        allow: fields besides OpenAI's that requests may use; others are refused by name.
        parse_sources: take ``<source id="1" name="...">text</source>`` in messages, as Open WebUI
            writes them, for documents. The text of a passage could forge further ones.
        new_tokens: largest number of tokens of an answer that names none.
        most_new_tokens: the most that a request may ask for.
        most_prompt_tokens: tokens of prefix, windows and query together; None for no limit.
        most_documents: that come with one request.
        most_choices: ``n``.
        most_body_bytes: of a request.
        max_rows: requests that are answered at a time; they share forward passes.
        max_bytes: memory that they may take, see `rag_windows.WindowedLM.scheduler`.
        most_waiting: requests in line behind them; more are refused with 429.
        wait_s: seconds in line, after which a request is refused with 503.
        idle_s: seconds in which a client must send a further part of its body, or read one of its
            answer.
        ping_s: seconds after which a silent stream gets a comment, so that no proxy takes it for
            dead; who asks for a stream and stands in line for so long gets its status, too.
        timeout_s: seconds for an answer, after which it is ended with 504; None for no limit.
        cors: origins whose pages may ask; none by default.
        hosts: names in the Host header that are answered; empty for all.
        examples: questions that the page at ``/`` offers to visitors.
        log_texts: whether questions and answers may stand in the log.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_name: str = "tiny-reader"
    model_aliases: tuple[str, ...] = ()
    system: str | None = None
    default_system: str | None = None
    top_k: int = Field(default=8, ge=1)
    most_top_k: int = Field(default=64, ge=1)
    allow: frozenset[PerRequest] = frozenset(get_args(PerRequest))
    parse_sources: bool = False
    new_tokens: int = Field(default=512, ge=1)
    most_new_tokens: int = Field(default=4096, ge=1)
    most_prompt_tokens: int | None = Field(default=None, ge=1)
    most_documents: int = Field(default=256, ge=0)
    most_choices: int = Field(default=8, ge=1)
    most_body_bytes: int = Field(default=32 << 20, ge=1)
    max_rows: int = Field(default=16, ge=1)
    max_bytes: int | str | None = None
    most_waiting: int = Field(default=64, ge=0)
    wait_s: float = Field(default=60.0, gt=0)
    idle_s: float = Field(default=60.0, gt=0)
    ping_s: float = Field(default=5.0, gt=0)
    timeout_s: float | None = Field(default=600.0, gt=0)
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    log_texts: bool = False

    def serves(self, name: str) -> bool:
        """Whether a request that names this model is answered."""
        return name == self.model_name or name in self.model_aliases
