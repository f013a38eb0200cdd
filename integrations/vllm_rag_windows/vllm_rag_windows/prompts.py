"""One request over windows: built from a conversation, sent to vLLM, and read again inside it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_windows.errors import InputError, MethodError
from rag_windows.interchange import (
    Method,
    Passage,
    Prompt,
    passage_of,
    query_bias,
    refuse_single,
    resolve,
)

Document = str | Passage | Mapping[str, Any]
Query = str | Sequence[Mapping[str, Any]]

_MOST_KNOWN = 1 << 17
_STEPS = attrgetter(
    *("windowed", "alignment", "encoding", "neighbours", "slope", "shift"),
    *("refinement", "recompute", "selection", "combination"),
)
_PCW = resolve("pcw")

M = TypeVar("M", bound=BaseModel)


def checked(kind: type[M], given: Any, name: str) -> M:
    """Read fields; InputError, beginning with their name, for the first that is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (name, *first["loc"])))[:120]
        raise InputError(
            f"{place}: {first['msg']}. The fields are {sorted(kind.model_fields)}."
        ) from error


class _Params(BaseModel):
    """The fields of ``kv_transfer_params``; further ones are an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prefix: int = Field(default=0, ge=0)
    windows: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    encode: bool = False
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class WindowedPrompt:
    """The token ids of one request, cut into prefix, windows and query.

    Attributes:
        prefix: may be empty.
        windows: none of them empty; without any, it is an ordinary request.
        query: empty where the request is there to encode its one window behind the prefix.
        temperature: T > 0, divides the logits inside the windows.
    """

    prefix: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    query: tuple[int, ...] = ()
    temperature: float = 1.0

    @property
    def encodes(self) -> bool:
        """Whether the request is there to encode its window."""
        return not self.query

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids in a row."""
        return (*self.prefix, *(token for ids in self.windows for token in ids), *self.query)

    @property
    def params(self) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` that go with the ids; None for an ordinary request."""
        if not self.windows:
            return None
        if self.encodes:
            return {"prefix": len(self.prefix), "encode": True}
        lengths = [len(ids) for ids in self.windows]
        return {"prefix": len(self.prefix), "windows": lengths, "temperature": self.temperature}

    @property
    def encodings(self) -> tuple[WindowedPrompt, ...]:
        """The requests that encode its windows, each once."""
        return tuple(WindowedPrompt(self.prefix, (ids,)) for ids in dict.fromkeys(self.windows))

    @property
    def read_tokens(self) -> int:
        """Tokens of prefix and all windows: those whose keys and values are loaded."""
        return len(self.prefix) + sum(map(len, self.windows))

    @property
    def rotation(self) -> int:
        """Positions by which keys are moved forward.

        vLLM counts the query's positions from `read_tokens` on. Attention with rotary embeddings
        knows only distances, so the keys are moved instead of the query, which belongs behind the
        longest window.
        """
        return self.read_tokens - len(self.prefix) - max(map(len, self.windows))

    @classmethod
    def of(
        cls, params: Mapping[str, Any] | None, ids: Sequence[int] | None
    ) -> WindowedPrompt | None:
        """Read ``kv_transfer_params`` and token ids; None for an ordinary request.

        Raises:
            InputError: the fields are wrong, don't fit the prompt, or ask for what vLLM's attention
                can't do.
        """
        if not params:
            return None
        given = checked(_Params, dict(params), "kv_transfer_params")
        if ids is None:
            raise InputError("Windows are read by token ids. Send prompt_token_ids, no embeddings.")
        prefix, rest = tuple(ids[: given.prefix]), tuple(ids[given.prefix :])
        if given.encode:
            if given.windows is not None or not rest:
                raise InputError(
                    "A request that encodes has one window: all of its prompt behind the prefix. "
                    "Leave 'windows' out, and send at least one token behind the prefix."
                )
            return cls(prefix, (rest,))
        if given.windows is None:
            raise InputError("kv_transfer_params need 'windows', the lengths of the windows.")
        ends = list(accumulate(given.windows, initial=0))
        if ends[-1] >= len(rest):
            raise InputError(
                f"Prefix and windows take {given.prefix + ends[-1]} tokens of a prompt of "
                f"{len(ids)}. At least one token of the query must follow them."
            )
        windows = tuple(rest[start:end] for start, end in pairwise(ends))
        return cls(prefix, windows, rest[ends[-1] :], given.temperature)


class WindowPrompts:
    """Makes requests of questions, by the chat template of the model's tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers, such as ``llm.get_tokenizer()``.
        method: "pcw", or "ape:temperature=0.9,scale=1"; all that change more than a temperature
            are refused.
        max_window_tokens: longer documents become several windows.
        prompt: options of `rag_windows.interchange.Prompt`, such as ``header``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        method: str | Method = "pcw",
        max_window_tokens: int | None = None,
        **prompt: Any,
    ) -> None:
        self._prompt = Prompt(tokenizer, **prompt)
        self._temperature = _temperature_of(method)
        self._max_window_tokens = max_window_tokens

    def build(
        self, query: Query, documents: Iterable[Document], method: str | Method | None = None
    ) -> WindowedPrompt:
        """The request of one question, or conversation, over documents.

        Raises:
            InputError: the conversation, a document or the method can't be used.
        """
        refuse_single(documents)
        passages = [passage_of(document) for document in documents]
        made = self._prompt.build(query, passages, max_window_tokens=self._max_window_tokens)
        temperature = self._temperature if method is None else _temperature_of(method)
        windows = tuple(window.ids for window in made.windows)
        return WindowedPrompt(made.prefix_ids, windows, made.query_ids, temperature)


def _temperature_of(given: str | Method) -> float:
    """The temperature of a method that differs from PCW in nothing else; MethodError otherwise."""
    method = resolve(given)
    biased = any(query_bias(method, count) for count in (1, 2, 20))
    if _STEPS(method) != _STEPS(_PCW) or biased:
        raise MethodError(
            f"{method!r} can't be served in vLLM, whose attention weighs all keys alike. Use "
            "'pcw', or 'ape:temperature=0.9,scale=1' with another temperature; for all other "
            "methods use rag-windows' own engine."
        )
    return method.temperature


def vllm_request(prompt: WindowedPrompt, sampling: Any = None) -> tuple[dict[str, Any], Any]:
    """A prompt and `SamplingParams` as vLLM takes them; `sampling` is of no use for encoding."""
    from vllm import SamplingParams

    asked: dict[str, Any] = {"prompt_token_ids": [*prompt.ids]}
    if prompt.params is None:
        return asked, sampling
    if prompt.encodes:
        made = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    else:
        made = sampling.clone()
    made.extra_args = {**(made.extra_args or {}), "kv_transfer_params": prompt.params}
    return asked, made


def failed(output: Any) -> bool:
    """Whether vLLM ended a request with an error."""
    return any(one.finish_reason == "error" for one in output.outputs)


class SentWindows:
    """Remembers which windows were encoded, so that most are sent once.

    It may be wrong: vLLM's side may have evicted an entry, or be another process by now. Then a
    reading request ends with an error, its windows are forgotten here, and sent again.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}

    def missing(self, prompts: Iterable[WindowedPrompt]) -> list[WindowedPrompt]:
        """The requests that encode what these prompts read and is not known, each once."""
        needed = {_digest(one): one for prompt in prompts for one in prompt.encodings}
        return [one for digest, one in needed.items() if digest not in self._known]

    def note(self, encoding: WindowedPrompt) -> None:
        """This request has ended well."""
        self._known[_digest(encoding)] = None
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def forget(self, prompt: WindowedPrompt) -> None:
        """What this prompt reads may be gone."""
        for one in prompt.encodings:
            self._known.pop(_digest(one), None)


def _digest(encoding: WindowedPrompt) -> bytes:
    return hashlib.sha256(repr((encoding.prefix, encoding.windows)).encode()).digest()
