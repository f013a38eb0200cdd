"""Encoded windows, shared by all settings that encode them alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING

from rag_windows.answer import encode_request
from rag_windows.calibration.prepared import Prepared
from rag_windows.context import EncodedContext
from rag_windows.kv import Members
from rag_windows.methods import Method

if TYPE_CHECKING:
    from rag_windows.engine import Engine

KEEP_BYTES = 4 << 30
"""Keys and values that are kept for the next round at most; others are encoded again for it."""


def encoding_key(method: Method) -> Hashable:
    """Equal for methods whose encoded contexts differ in nothing but how they are read."""
    return (
        method.windowed,
        method.encoding,
        method.alignment,
        repr(method.linking),
        method.selection is None,
        # Of an ensemble the windows lie as rows, with weights of its own.
        None if method.combination is None else repr(method),
    )


class Contexts:
    """The encoded contexts of all examples.

    Attributes:
        encodings: how often an example's windows were encoded; without a refinement, and while
            they fit into `keep_bytes`, that is once an example whatever the number of settings.

    Args:
        engine: the model; its passage cache is used where it has one.
        keep_bytes: see `KEEP_BYTES`.
    """

    def __init__(self, engine: Engine, keep_bytes: int = KEEP_BYTES) -> None:
        self._engine = engine
        self._room = keep_bytes
        self._kept: dict[Hashable, EncodedContext] = {}
        self._passing: dict[Hashable, EncodedContext] = {}
        self.encodings = 0

    def context(self, prepared: Prepared, method: Method) -> EncodedContext:
        """What the example's query reads under a method."""
        key = (prepared.number, encoding_key(method))
        context = self._kept.get(key) or self._passing.get(key)
        if context is None:
            context = self._encode(prepared, method)
            size = _bytes(context)
            if size <= self._room:
                self._room -= size
                self._kept[key] = context
            else:
                # The next settings ask for it as well; the next example does not.
                self._passing = {key: context}
        return dataclasses.replace(context, method=method)

    def _encode(self, prepared: Prepared, method: Method) -> EncodedContext:
        self.encodings += 1
        request = dataclasses.replace(prepared.request, method=method)
        return encode_request(self._engine.encoder, request)


def _bytes(context: EncodedContext) -> int:
    windows = context.windows
    if windows is None:
        return 0
    held = windows.windows if isinstance(windows, Members) else [windows]
    return sum(tensor.nbytes for one in held for tensor in (*one.keys, *one.values))
