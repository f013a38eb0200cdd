"""Plain text to ids with a tokenizer that transformers runs in Python."""

from __future__ import annotations

import copy
import re
from typing import Any

from rag_windows.control_tokens import ControlTokens, any_of
from rag_windows.fast_text import At
from rag_windows.forks import cached_property

# Protocol buffers merge when they are joined, and the last value counts. This one is
# `ModelProto { normalizer_spec (field 3) { add_dummy_prefix (field 3): false } }`; writing it out
# saves the dependency on protobuf.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class PythonText:
    """Encodes text with a Python tokenizer, SentencePiece-backed or not, keeping controls out.

    Ordinary text takes the tokenizer's own path. Text that yields a control token there is encoded
    without the added tokens; if a control token still comes out of the vocabulary itself, the text
    is cut inside each spelling, and in the end between all characters.
    """

    def __init__(self, tokenizer: Any, controls: ControlTokens) -> None:
        self._tokenizer = tokenizer
        self._controls = controls

    def whole(self, text: str, at: At) -> list[int]:
        """Ids with control tokens read, as the original tokenizer reads a rendered prompt."""
        tokenizer = self._continued if at == "text" else self._tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def plain(self, text: str, at: At) -> list[int]:
        """Ids of plain text; the caller checks that no control token is among them."""
        ids = self.whole(text, at)
        if not self._leaks(text, ids):
            return ids
        ids = self._unadded(text, at)
        if not self._leaks(text, ids):
            return ids
        cuts = [match.start() + 1 for match in self._overlapping.finditer(text)]
        ids = self._pieces(text, cuts, at)
        if not self._controls.ids.intersection(ids):
            return ids
        return self._pieces(text, list(range(1, len(text))), at)

    def _leaks(self, text: str, ids: list[int]) -> bool:
        unknown = self._controls.unknown
        if unknown and unknown[1] in ids and self._overlapping.search(text):
            return True
        return not self._controls.ids.isdisjoint(ids)

    def _unadded(self, text: str, at: At) -> list[int]:
        tokenizer = self._continued if at == "text" else self._tokenizer
        ids: list[int] = []
        for chunk in self._kept.split(text) if self._controls.text_tokens else [text]:
            if chunk in self._controls.text_tokens:
                ids.append(tokenizer.convert_tokens_to_ids(chunk))
            elif chunk:
                tokens = tokenizer.tokenize(chunk, split_special_tokens=True)
                ids += tokenizer.convert_tokens_to_ids(tokens)
        return ids

    def _pieces(self, text: str, cuts: list[int], at: At) -> list[int]:
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            ids += self._unadded(text[start:end], at if start == 0 else "text")
        return ids

    @cached_property
    def _overlapping(self) -> re.Pattern[str]:
        # Case is ignored because many Python tokenizers lower it before they look words up.
        return re.compile(f"(?={self._controls.spelled.pattern})", re.IGNORECASE)

    @cached_property
    def _kept(self) -> re.Pattern[str]:
        return re.compile(f"({any_of(self._controls.text_tokens)})")

    @cached_property
    def _continued(self) -> Any:
        """The tokenizer without SentencePiece's dummy prefix, for text within a prompt."""
        model: Any = getattr(self._tokenizer, "sp_model", None)
        if not hasattr(model, "serialized_model_proto"):
            return self._tokenizer
        unprefixed = type(model)()
        unprefixed.LoadFromSerializedProto(model.serialized_model_proto() + _NO_DUMMY_PREFIX)
        tokenizer = copy.copy(self._tokenizer)
        tokenizer.sp_model = unprefixed
        return tokenizer
