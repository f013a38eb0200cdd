"""Entries as files: what the header says, and how tensors lie in the payload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from rag_windows.cache.codec import Codec, Stored
from rag_windows.cache.container import (
    FormatError,
    Slot,
    header_bytes,
    lay_out,
    parse_header,
)
from rag_windows.cache.digest import DIGESTS
from rag_windows.cache.entry import Entry

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
"""Bytes digested at a time: few enough to be in a cache still when they were just read."""


@dataclass(frozen=True, slots=True)
class Image:
    """A file before it is written.

    Attributes:
        header: everything before the payload.
        payload: its parts in order; they keep the tensors alive that they show.
        nbytes: size of the file.
    """

    header: bytes
    payload: tuple[memoryview, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Note:
    """What a file's header says, proven by its seal.

    Attributes:
        labels: the entry's labels.
        created: unix time in seconds.
        expires: unix time in seconds, or None.
        cost_s: seconds that encoding took.
        start: position of the first token.
        tokens: how many there are.
        codec: name of the stored form.
        description: what that form needs for decoding.
        runs: for each tensor of the payload: which of the stored form's tensors are stacked in it.
        digest: name and value of the payload's digest.
        slots: the payload's tensors.
        header_nbytes: where the payload begins.
    """

    labels: tuple[str, ...]
    created: float
    expires: float | None
    cost_s: float
    start: int
    tokens: int
    codec: str
    description: dict[str, Any]
    runs: tuple[tuple[int, ...], ...]
    digest: tuple[str, str]
    slots: tuple[Slot, ...]
    header_nbytes: int

    @property
    def payload_nbytes(self) -> int:
        """Size of the payload."""
        return self.slots[-1].begin + self.slots[-1].nbytes if self.slots else 0


def draw_up(key: str, entry: Entry, codec: Codec, digest: str) -> Image:
    """Lay an entry out as a file.

    Token ids are left out, as anybody with the tokenizer can read them.

    Tensors of one dtype and shape are stacked as one, so that reading makes few of them: the layers
    of most models take a single one.

    Args:
        key: the entry's checked key.
        entry: on any device.
        codec: gives the stored form.
        digest: a name in `DIGESTS`.

    Raises:
        FormatError: for a dtype that can't be stored, or a header that gets too long.
        CacheError: what the codec raises.
    """
    window = entry.window
    stored = codec.encode(window)
    runs = _stacked(stored.tensors)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for number, run in enumerate(runs):
        first = stored.tensors[run[0]]
        shapes[f"run{number}"] = (first.dtype, (len(run), *first.shape))
    slots = lay_out(shapes)
    order = [index for run in runs for index in run]
    tensors = [stored.tensors[index] for index in order]
    payload = tuple(_bytes_of(tensor) for tensor in tensors if tensor.numel())
    running = DIGESTS[digest]()
    for part in payload:
        running.update(part)
    note = {
        "key": key,
        "labels": list(entry.labels),
        "created": _finite(entry.created),
        "expires": None if entry.expires is None else _finite(entry.expires),
        "cost_s": _finite(entry.cost_s),
        "start": window.start,
        "tokens": len(window.ids),
        "codec": codec.name,
        "description": stored.description,
        "runs": runs,
        "digest": [digest, running.hexdigest()],
    }
    header = header_bytes(note, slots)
    return Image(header, payload, len(header) + sum(part.nbytes for part in payload))


def read_note(header: bytes, key: str) -> Note:
    """Prove a header right and that it belongs to `key`.

    Raises:
        FormatError: if it doesn't, or anything about it is wrong.
    """
    note, slots = parse_header(header)
    try:
        if note["key"] != key:
            raise FormatError("the file belongs to another key.")
        digest, value = note["digest"]
        found = Note(
            labels=tuple(_typed(label, str) for label in note["labels"]),
            created=float(note["created"]),
            expires=None if note["expires"] is None else float(note["expires"]),
            cost_s=float(note["cost_s"]),
            start=_typed(note["start"], int),
            tokens=_typed(note["tokens"], int),
            codec=_typed(note["codec"], str),
            description=_typed(note["description"], dict),
            runs=tuple(tuple(_typed(i, int) for i in run) for run in note["runs"]),
            digest=(_typed(digest, str), _typed(value, str)),
            slots=tuple(slots),
            header_nbytes=len(header),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"the header's note can't be read: {error}") from error
    _check_runs(found)
    return found


def decode(note: Note, payload: torch.Tensor, codec: Codec) -> Entry:
    """Turn a payload, whose digest was right, into its entry.

    Args:
        note: from `read_note`.
        payload: (n,) uint8 in owned memory; the entry's tensors are views of it.
        codec: what the note names.

    Returns:
        The entry; all ids of its window are 0, since the file does not hold them.

    Raises:
        FormatError: if tensors and header don't fit.
        CacheError: what the codec raises.
    """
    shaped = [
        payload[slot.begin : slot.begin + slot.nbytes].view(slot.dtype).view(slot.shape)
        for slot in note.slots
    ]
    tensors: dict[int, torch.Tensor] = {}
    for run, stack in zip(note.runs, shaped, strict=True):
        tensors.update(zip(run, stack.unbind(0), strict=True))
    stored = Stored(tuple(tensors[i] for i in range(len(tensors))), note.description)
    window = codec.decode(stored, (0,) * note.tokens, note.start)
    return Entry(window, note.cost_s, note.labels, note.created, note.expires)


def _check_runs(note: Note) -> None:
    if len(note.runs) != len(note.slots) or not 0 <= note.tokens <= note.payload_nbytes:
        raise FormatError("header and tensors don't fit.")
    for run, slot in zip(note.runs, note.slots, strict=True):
        if not slot.shape or slot.shape[0] != len(run):
            raise FormatError("header and tensors don't fit.")
    held = sorted(index for run in note.runs for index in run)
    if held != list(range(len(held))):
        raise FormatError("a tensor is missing or there twice.")
    if note.start < 0 or note.digest[0] not in DIGESTS:
        raise FormatError("the header says what this version doesn't know.")


def _stacked(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of tensors of one dtype and shape together; wide dtypes first, so all are aligned."""
    runs: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for index, tensor in enumerate(tensors):
        runs.setdefault((tensor.dtype, tensor.shape), []).append(index)
    return sorted(runs.values(), key=lambda run: -tensors[run[0]].dtype.itemsize)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _finite(seconds: float) -> float:
    return float(seconds) if math.isfinite(seconds) else 0.0


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{kind.__name__} expected, not {type(value).__name__}")
    return value
