"""From a conversation and documents to the requests that vLLM gets."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_windows.errors import MethodError
from rag_windows.interchange import Method, Passage, Prompt, passage_of, query_bias, resolve

Document = str | Passage | Mapping[str, Any]

_MOST_KNOWN = 1 << 17


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One request to vLLM: token ids, and its ``kv_transfer_params`` unless it is ordinary."""

    ids: tuple[int, ...]
    params: Mapping[str, Any] | None = None

    @property
    def digest(self) -> bytes:
        """The same for equal requests."""
        text = f"{self.ids} {sorted((self.params or {}).items())}"
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True)
class WindowRequests:
    """What one question takes: encoding requests, of which some may be superfluous, then one."""

    encode: tuple[TokenRequest, ...]
    read: TokenRequest


def temperature_of(method: Method) -> float:
    """The temperature of a method that is nothing but a temperature.

    Raises:
        MethodError: vLLM's attention can't do what the method does.
    """
    further = method.refinement, method.recompute, method.selection, method.combination
    plain = method.windowed and method.alignment == "left" and further == (None,) * 4
    plain = plain and (method.slope, method.shift) == (1, 0)
    if not plain or any(query_bias(method, count) for count in (1, 2, 20)):
        raise MethodError(
            f"{method!r} can't be served in vLLM, whose attention weighs all keys alike. Use "
            "'pcw', or 'ape:temperature=0.9,scale=1' with another temperature; for all other "
            "methods use rag-windows' own engine."
        )
    return method.temperature


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
        self._temperature = temperature_of(resolve(method))
        self._max_window_tokens = max_window_tokens

    def build(
        self, query: str | Sequence[Mapping[str, Any]], documents: Iterable[Document]
    ) -> WindowRequests:
        """The requests of one question, or conversation, over documents.

        Raises:
            InputError: the conversation or a document can't be used.
        """
        passages = [passage_of(document) for document in documents]
        made = self._prompt.build(query, passages, max_window_tokens=self._max_window_tokens)
        prefix, windows = made.prefix_ids, [window.ids for window in made.windows]
        if not windows:
            return WindowRequests((), TokenRequest(made.query_ids))
        encode = {"prefix": len(prefix), "encode": True}
        whole = (*prefix, *(token for ids in windows for token in ids), *made.query_ids)
        read = {
            "prefix": len(prefix),
            "windows": [len(ids) for ids in windows],
            "temperature": self._temperature,
        }
        return WindowRequests(
            tuple(TokenRequest((*prefix, *ids), encode) for ids in dict.fromkeys(windows)),
            TokenRequest(whole, read),
        )


class Encoded:
    """Remembers which encoding requests were sent, so that most are sent once.

    It may be wrong: vLLM's side may have evicted an entry, or be another process by now. Then a
    reading request ends with an error, and what it needs is sent again.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def missing(
        self, requests: Iterable[TokenRequest], *, again: bool = False
    ) -> list[TokenRequest]:
        """Those that were not sent yet, or all of them `again`; each once."""
        unique = {one.digest: one for one in requests}
        with self._lock:
            return [one for key, one in unique.items() if again or key not in self._known]

    def note(self, requests: Iterable[TokenRequest]) -> None:
        """These were sent, and have ended well."""
        with self._lock:
            for one in requests:
                self._known[one.digest] = None
                self._known.move_to_end(one.digest)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def forget(self, requests: Iterable[TokenRequest]) -> None:
        """These may be gone."""
        with self._lock:
            for one in requests:
                self._known.pop(one.digest, None)
