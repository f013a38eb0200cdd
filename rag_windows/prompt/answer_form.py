"""Answers of a given form, by construction: JSON of a schema, or what a grammar allows.

llguidance (extra ``structured``) says before each token which ones may follow; a logits processor
of transformers excludes all others. So it works wherever processors do: in single answers, in
streams, in batches and beside other questions of a scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LogitsProcessor

from rag_windows.errors import GenerationError, InputError, installed, require
from rag_windows.prompt.detokenize import TextStream
from rag_windows.prompt.reasoning import ReasoningFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As json.dumps and chat templates write it; free white space would let an answer go on for ever.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


FORMS = ("json_schema", "grammar")
"""Options of ``generate`` that hold an answer to a form."""


def available() -> bool:
    """Whether answers can be given a form: whether llguidance is installed."""
    return installed("llguidance")


def with_form(
    options: Mapping[str, Any],
    tokenizer: Any,
    vocabulary: int,
    ends: frozenset[int],
    reasoning: ReasoningFormat | None = None,
) -> dict[str, Any]:
    """Options of ``generate`` with a logits processor in place of ``json_schema`` or ``grammar``.

    `vocabulary` is how many logits the model gives for a token; `ends` end an answer. Where its
    answers begin with `reasoning`, this is unrestricted, but has to end.
    """
    rest = dict(options)
    schema, grammar = rest.pop("json_schema", None), rest.pop("grammar", None)
    if schema is None and grammar is None:
        return rest
    if schema is not None and grammar is not None:
        raise InputError("json_schema and grammar can't both be given. Leave one of them out.")
    source = _source("grammar", grammar) if schema is None else _source("json_schema", schema)
    matcher = _llguidance().LLMatcher(_vocabulary(tokenizer, vocabulary, ends), source)
    allowed = _Allowed(matcher, ends, reasoning)
    rest["logits_processor"] = [*(rest.get("logits_processor") or []), allowed]
    return rest


def call_grammar(calls: Mapping[str, Mapping[str, Any]], brackets: str) -> str | None:
    """The grammar of what follows the beginning of a call that was written for the model.

    For each tool that may be called, `calls` has what is left to write before its arguments, and
    their JSON schema; `brackets` close the call. None if answers can't be held to a schema.
    """
    choices = []
    rules = []
    for index, (before, schema) in enumerate(calls.items()):
        choices.append(f'{json.dumps(before)} " "? call{index}' if before else f'" "? call{index}')
        rules.append(f"call{index}: %json {json.dumps(_laid_out(schema))}")
    closed = " ".join(f'/[ \\n]?/ "{bracket}"' for bracket in brackets)
    lark = f"start: ({' | '.join(choices)}) {closed}\n" + "\n".join(rules)
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
    message = matcher.validate_grammar(source)
    if message and not message.startswith("WARNING"):
        raise InputError(f"This {name} can't be used for an answer: {message.strip()}")
    return str(source)


class _Allowed(LogitsProcessor):
    """Lets those tokens through that the form allows next; rows may swap and go back."""

    def __init__(
        self, matcher: LLMatcher, ends: frozenset[int], reasoning: ReasoningFormat | None
    ) -> None:
        self._fresh = matcher
        self._ends, self._reasoning = sorted(ends), reasoning
        self._prompt: torch.Tensor | None = None
        self._rows: list[tuple[LLMatcher, torch.Tensor]] = []
        self._thoughts: list[_Thought] = []

    def at(self, row: int, ids: torch.Tensor) -> LLMatcher | None:
        """What may follow the ids of a row; None if they have left the form."""
        while len(self._rows) <= row:
            self._rows.append((self._fresh.deep_copy(), ids[:0].cpu()))
        matcher, taken = self._rows[row]
        wanted = ids[0 if self._prompt is None else len(self._prompt) :].cpu()
        if self._reasoning is not None:
            wanted = wanted[self._thoughts[row].end :]
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
            self._prompt, self._rows, self._thoughts = input_ids[0].clone(), [], []
        rows, vocabulary = scores.shape
        allowed = torch.zeros(rows, vocabulary, dtype=torch.bool)
        for row in range(rows):
            if self._thinks(row, input_ids[row]):
                allowed[row] = True
                allowed[row, self._ends] = False
                continue
            matcher = self.at(row, input_ids[row])
            if matcher is None and rows == 1:
                raise GenerationError(
                    "The answer broke its schema or grammar, because another option of generate "
                    "forbids what the form needs (min_new_tokens, for one, forbids the end). "
                    "Leave that option out."
                )
            if matcher is None:  # a beam that can't become an answer
                continue
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            bits = torch.from_numpy(np.unpackbits(mask, bitorder="little").astype(bool))
            width = min(vocabulary, len(bits))
            allowed[row, :width] = bits[:width]
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def _thinks(self, row: int, ids: torch.Tensor) -> bool:
        if self._reasoning is None:
            return False
        while len(self._thoughts) <= row:
            self._thoughts.append(_Thought(self._reasoning))
        written = ids[0 if self._prompt is None else len(self._prompt) :].tolist()
        if not self._thoughts[row].follow(written):
            self._thoughts[row] = _Thought(self._reasoning)
            self._thoughts[row].follow(written)
        return self._thoughts[row].end is None


class _Thought:
    """Where the reasoning of one row ends.

    Attributes:
        end: how many tokens it has; None where it is not over.
    """

    def __init__(self, format: ReasoningFormat) -> None:
        self._parts = format.parts()
        self._text = TextStream(format.detokenizer, parts=self._parts)
        self._ids: list[int] = []
        self.end: int | None = None

    def follow(self, ids: list[int]) -> bool:
        """Take the tokens of the row that are new; False if earlier ones are others now."""
        if ids[: len(self._ids)] != self._ids:
            return False
        for id_ in ids[len(self._ids) :] if self.end is None else ():
            self._text.feed([id_])
            self._ids.append(id_)
            if self._parts.answering:
                self.end = len(self._ids)
                break
        return True


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two sequences have in common from their start."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _llguidance() -> Any:
    require("An answer held to a schema or grammar", "llguidance", extra="structured")
    import llguidance

    return llguidance


def _laid_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, whose objects have the properties that it names and no others.

    Unless it says otherwise: JSON Schema allows any more, and a model might not stop inventing.
    Where several schemas describe one object, each would forbid what the others name; such a schema
    stays as it is.
    """
    made = json.loads(json.dumps(schema, default=dict))
    parts = list(_schemas_in(made))
    if not any(map(_composed, parts)):
        for part in parts:
            if part.get("type") == "object" and isinstance(part.get("properties"), dict):
                part.setdefault("additionalProperties", False)
    return {**made, "x-guidance": _LAYOUT}


_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA = ("enum", "const", "default", "examples")


def _schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and those within it."""
    if isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name in _NAMED and isinstance(value, dict):
                yield from _schemas_in([*value.values()])
            elif name not in _DATA:
                yield from _schemas_in(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _schemas_in(one)


def _composed(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas describe the same value."""
    all_of = schema.get("allOf")
    joined = len(all_of) if isinstance(all_of, list) else 0
    others = sum(name in schema for name in ("properties", "$ref", "anyOf", "oneOf"))
    return joined + others > 1


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, size: int, ends: frozenset[int]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, size, [*ends] or None)
