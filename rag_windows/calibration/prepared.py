"""Examples made ready: tokenized once, with the answers that every setting is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rag_windows.answer import encode_request
from rag_windows.calibration.example import Example
from rag_windows.calibration.forced import forced_logprobs
from rag_windows.errors import InputError
from rag_windows.methods import Method, Sequential
from rag_windows.request import Request, check_limits

if TYPE_CHECKING:
    from rag_windows.engine import Engine

OnProgress = Callable[[str, int, int | None], None]
"""Told what goes on, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The sequential reader's answer.

    Attributes:
        ids: its greedy tokens, end token included.
        logprobs: (tokens, vocabulary) fp32: its distribution at each of them.
    """

    ids: tuple[int, ...]
    logprobs: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """One example, ready to be answered under any setting.

    Attributes:
        number: of the example, counted from 0.
        example: as it was given.
        request: tokenized for windows.
        gold: tokens of the right answer, without an end; None if unlabelled.
        reference: None where the passages don't fit one after the other.
    """

    number: int
    example: Example
    request: Request
    gold: tuple[int, ...] | None
    reference: Reference | None


def prepare(
    engine: Engine,
    examples: Sequence[Example],
    settings: Sequence[Method],
    *,
    prefix: str | None,
    max_new_tokens: int,
    need_reference: bool,
    on_progress: OnProgress,
) -> tuple[list[Prepared], list[str]]:
    """Tokenize the examples and let the sequential reader answer them.

    Args:
        engine: the model.
        examples: as given.
        settings: that every example has to fit.
        prefix: system prompt, as requests will have it.
        max_new_tokens: of the sequential reader's answer.
        need_reference: leave out examples whose passages don't fit one after the other.
        on_progress: told how many examples are read.

    Returns:
        The examples that can be used, and a sentence for each that can't or that lacks a reference.
    """
    ready, left_out = [], []
    for number, example in enumerate(examples):
        name = f"Example {number + 1}"
        on_progress("Reading sequentially", number, len(examples))
        try:
            request = engine.request(
                example.query,
                example.passages,
                prefix=prefix,
                method="pcw",
                max_new_tokens=max_new_tokens,
            )
            for one in settings:
                check_limits(
                    request.parts, request.passages, one, max_new_tokens, engine.position_limit
                )
        except InputError as error:
            left_out.append(f"{name} was left out: {error}")
            continue
        if not request.parts.windows:
            left_out.append(f"{name} was left out: it has no passages.")
            continue
        reference, gold = None, None
        if example.answer is not None:
            text = engine.text.prompt
            gold = tuple(text.encode_text(example.answer.strip(), continuation=True))
        try:
            reference = _reference(engine, example, prefix, max_new_tokens)
        except InputError as error:
            if need_reference:
                left_out.append(f"{name} was left out: {error}")
                continue
            left_out.append(f"{name} is not compared with sequential reading: {error}")
        ready.append(Prepared(number, example, request, gold, reference))
    on_progress("Reading sequentially", len(examples), len(examples))
    return ready, left_out


def _reference(
    engine: Engine, example: Example, prefix: str | None, max_new_tokens: int
) -> Reference:
    """Raises `LimitError` where the passages don't fit."""
    request = engine.request(
        example.query,
        example.passages,
        prefix=prefix,
        method=Sequential(),
        max_new_tokens=max_new_tokens,
    )
    # Read once and thrown away: no cache would be asked for this order of passages again.
    context = encode_request(engine.plain_encoder, request)
    query = request.parts.query_ids
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    ids = engine.decoder.generate(context, query, options=options).sequences[0]
    (logprobs,) = forced_logprobs(engine.decoder, context, query, [ids])
    return Reference(tuple(ids), logprobs)
