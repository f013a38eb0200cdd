"""Answers of a given form, by construction: JSON of a schema, or what a grammar allows.

llguidance (extra ``structured``) tells before each token which ones may follow; a logits processor
of transformers' kind lets no other through. So it works wherever processors do: alone, streamed, in
batches and beside other questions of a scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LogitsProcessor

from rag_windows.errors import GenerationError, InputError, installed, require

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As json.dumps and chat templates write it; free white space would let an answer go on for ever.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def available() -> bool:
    """Whether answers can be given a form: whether llguidance is installed."""
    return installed("llguidance")


def with_form(
    options: Mapping[str, Any], tokenizer: Any, vocabulary: int, ends: frozenset[int]
) -> dict[str, Any]:
    """Options of ``generate`` where ``json_schema`` or ``grammar`` became what enforces it.

    `vocabulary` is how many logits the model gives for a token; `ends` end an answer.
    """
    rest = dict(options)
    schema, grammar = rest.pop("json_schema", None), rest.pop("grammar", None)
    if schema is None and grammar is None:
        return rest
    if schema is not None and grammar is not None:
        raise InputError("json_schema and grammar can't both be given. Leave one of them out.")
    source = _source("grammar", grammar) if schema is None else _source("json_schema", schema)
    allowed = _Allowed(_llguidance().LLMatcher(_vocabulary(tokenizer, vocabulary, ends), source))
    rest["logits_processor"] = [*(rest.get("logits_processor") or []), allowed]
    return rest


def call_grammar(calls: Mapping[str, Mapping[str, Any]], brackets: str) -> str | None:
    """The grammar of what follows the beginning of a call that was written for the model.

    For each tool that may be called, `calls` has what is left to write before its arguments, and
    their JSON schema; `brackets` close the call. None if answers can't be held to a schema.
    """
    ways = []
    rules = []
    for index, (before, schema) in enumerate(calls.items()):
        ways.append(f'{json.dumps(before)} " "? call{index}' if before else f'" "? call{index}')
        rules.append(f"call{index}: %json {json.dumps(_laid_out(schema))}")
    closed = " ".join(f'/[ \\n]?/ "{bracket}"' for bracket in brackets)
    lark = f"start: ({' | '.join(ways)}) {closed}\n" + "\n".join(rules)
    try:
        _source("grammar", lark)
    except InputError:
        return None
    return lark


def check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that answers can't be held to, or any without llguidance."""
    _source("json_schema", schema)


def _source(name: str, form: Any) -> str:
    """The form as llguidance takes it."""
    matcher = _llguidance().LLMatcher
    try:
        if name == "grammar":
            source = matcher.grammar_from_lark(form)
        else:
            source = matcher.grammar_from_json_schema(json.dumps(_laid_out(form)))
    except (TypeError, ValueError) as error:
        raise InputError(
            "json_schema must be a mapping (of a pydantic class its model_json_schema()), and "
            f"grammar a text in llguidance's form of Lark: {error}"
        ) from error
    told = matcher.validate_grammar(source)
    if told and not told.startswith("WARNING"):
        raise InputError(f"This {name} can't be used for an answer: {told.strip()}")
    return str(source)


class _Allowed(LogitsProcessor):
    """Lets those tokens through that the form allows next; rows may swap and go back."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._fresh = matcher
        self._prompt: torch.Tensor | None = None
        self._rows: list[tuple[LLMatcher, torch.Tensor]] = []

    def at(self, row: int, ids: torch.Tensor) -> LLMatcher | None:
        """What may follow the ids of a row; None if they have left the form."""
        while len(self._rows) <= row:
            self._rows.append((self._fresh.deep_copy(), ids[:0].cpu()))
        matcher, taken = self._rows[row]
        wanted = ids[0 if self._prompt is None else len(self._prompt) :].cpu()
        both = min(len(taken), len(wanted))
        # All tokens are compared for each new one, so not one by one.
        changed = (taken[:both] != wanted[:both]).nonzero()
        same = int(changed[0]) if len(changed) else both
        if same < len(taken):
            matcher.rollback(len(taken) - same)
        good = same + matcher.try_consume_tokens(wanted[same:].tolist())
        self._rows[row] = matcher, wanted[:good].clone()
        if matcher.is_error():
            raise GenerationError(
                f"The answer can't be held to its schema or grammar: {matcher.get_error()}"
            )
        return matcher if good == len(wanted) or matcher.is_stopped() else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # The prompt is what stands before the first choice.
        prompt = self._prompt
        if prompt is None or not torch.equal(prompt, input_ids[0, : len(prompt)]):
            self._prompt, self._rows = input_ids[0].clone(), []
        rows, vocabulary = scores.shape
        allowed = torch.zeros(rows, vocabulary, dtype=torch.bool)
        for row in range(rows):
            matcher = self.at(row, input_ids[row])
            if matcher is None and rows == 1:
                raise GenerationError(
                    "The answer broke its schema or grammar, because another option of generate "
                    "forbids what the form needs (min_new_tokens, for one, forbids the end). "
                    "Leave that option out."
                )
            if matcher is None:  # a beam that nothing can be made of
                continue
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            bits = torch.from_numpy(np.unpackbits(mask, bitorder="little").astype(bool))
            kept = min(vocabulary, len(bits))
            allowed[row, :kept] = bits[:kept]
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two sequences have in common from their start."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _llguidance() -> Any:
    require("An answer held to a schema or grammar", "llguidance", extra="structured")
    import llguidance

    return llguidance


def _laid_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**_closed(schema), "x-guidance": _LAYOUT}


def _closed(schema: Any) -> Any:
    """The schema, whose objects have the properties that it names and no others.

    Unless it says otherwise: JSON Schema allows any more, and a model might not stop inventing.
    """
    if isinstance(schema, Mapping):
        closed = {name: _closed(value) for name, value in schema.items()}
        if isinstance(schema.get("properties"), Mapping) and schema.get("type") == "object":
            closed.setdefault("additionalProperties", False)
        return closed
    return [_closed(value) for value in schema] if isinstance(schema, list | tuple) else schema


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, size: int, ends: frozenset[int]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, size, [*ends] or None)
