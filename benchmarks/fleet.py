"""A fleet of replicas, simulated; the form in which a real run is handed over."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RecordedQuestion(BaseModel):
    """One question of a real run.

    Attributes:
        arrival_s: when it was asked, in seconds since the first one was.
        passages: a number for each of its passages, in order; equal numbers are equal passages.
        tokens: the tokens of each passage's window.
        replica: the name of the one that answered.
        encoded_tokens: of its passages, the tokens that were encoded for it: those of windows that
            were in no tier.
        first_token_s: from the request to the first text, for the client.
        whole_s: from the request to the end of the answer, if it is known.
    """

    model_config = ConfigDict(extra="forbid")

    arrival_s: float = Field(ge=0)
    passages: list[int]
    tokens: list[int]
    replica: str
    encoded_tokens: int = Field(ge=0)
    first_token_s: float = Field(ge=0)
    whole_s: float | None = None


class Record(BaseModel):
    """A real run of a fleet, for the simulator to be compared with.

    Of a run without a shared store (with one, every passage is encoded once at most, whoever
    answers) and without kills, from empty caches on.

    Attributes:
        routing: by its name in `rag_windows.fleet.routing.ROUTINGS`.
        replicas: names of all replicas.
        memory_bytes: limit of each replica's memory tier: ``PassageCache(memory=...)``.
        token_bytes: of the memory tier, for each token that it holds: its bytes by `stats()` over
            the tokens of the passages in it (8,254 for tiny-reader with windows of 256 tokens).
        publish_s: seconds between two times that a replica publishes what it holds.
        questions: in the order of their arrival.
        machine: what it ran on.
        command: how it was started.
    """

    model_config = ConfigDict(extra="forbid")

    routing: Literal["resident", "consistent", "prefix", "random"]
    replicas: list[str] = Field(min_length=1)
    memory_bytes: int = Field(gt=0)
    token_bytes: float = Field(gt=0)
    publish_s: float = Field(gt=0)
    questions: list[RecordedQuestion]
    machine: str = ""
    command: str = ""
