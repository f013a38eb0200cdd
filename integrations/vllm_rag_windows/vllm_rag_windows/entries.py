"""Entries of prefixes and windows in a passage cache, and the options that say where it is."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ByteSize, ConfigDict, StringConstraints, ValidationError

from rag_windows.errors import CacheError, InputError
from rag_windows.interchange import (
    EXACT,
    NO_TOKENIZER,
    Entry,
    KeyScope,
    PassageCache,
    Window,
    is_finite,
    resolve,
)
from vllm_rag_windows.windowed_prompt import WindowedPrompt

SALT_VARIABLE = "RAG_WINDOWS_SALT"
"""Environment variable with the secret of `PassageCache`; vLLM logs its options, so it is none."""

_ENCODING = resolve("pcw").encoding
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".json", ".gguf")

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class EntryOptions(BaseModel):
    """``kv_connector_extra_config``.

    Attributes:
        memory: host memory for entries, as `PassageCache` has it.
        path: folder of entries on disk; None for memory alone.
        disk: most that they take there.
        recent: host memory for what was encoded last, whatever else is kept: a question must find
            there what has just been encoded for it.
        model_fingerprint: 64 hexadecimal digits in place of a digest of the model's files. With
            those of a `WindowedLM` the two engines find each other's entries.
        tokenizer_fingerprint: the same of the tokenizer; by default, entries are of token ids.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    memory: int | str | None = "4GiB"
    path: str | None = None
    disk: int | str | None = None
    recent: ByteSize = ByteSize(1 << 30)
    model_fingerprint: Digest | None = None
    tokenizer_fingerprint: Digest = NO_TOKENIZER.hex()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EntryOptions:
        """Read them; InputError for a name or a value that is none."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise InputError(
                f"kv_connector_extra_config.{place}: {first['msg']}. It takes "
                f"{sorted(cls.model_fields)}."
            ) from error


class MissingEntriesError(CacheError):
    """A request reads what has not been encoded, or has been evicted."""


class Entries:
    """What one model has encoded, in a passage cache.

    Args:
        model: fingerprint of the model, 32 bytes.
    """

    def __init__(self, options: EntryOptions, model: bytes) -> None:
        salt = os.environ.get(SALT_VARIABLE) or None
        self.cache = PassageCache(options.memory, options.disk, options.path, salt=salt)
        self._model, self._tokenizer = model, bytes.fromhex(options.tokenizer_fingerprint)
        # The cache decides by itself what is worth keeping.
        self._recent: OrderedDict[str, Window] = OrderedDict()
        self._recent_bytes, self._most_recent = 0, int(options.recent)

    def find(self, prompt: WindowedPrompt) -> list[Window]:
        """The prefix, unless it is empty, and the windows, in order.

        Raises:
            MissingEntriesError: not all of them are there.
        """
        prefix, windows = self._keys(prompt)
        keys = ([] if prefix is None else [prefix]) + windows
        wanted = list(dict.fromkeys(keys))
        entries = self.cache.quick([key for key in wanted if key not in self._recent])
        left = [key for key in wanted if key not in entries and key not in self._recent]
        entries |= self.cache.from_disk(left)
        found = {key: entry.window for key, entry in entries.items()}
        for key in self._recent.keys() & set(wanted):
            self._recent.move_to_end(key)
            found[key] = self._recent[key]
        if missing := [number for number, key in enumerate(windows) if key not in found]:
            raise MissingEntriesError(
                f"Windows {missing} have not been encoded, or were evicted. Send a request of "
                "prefix and window with kv_transfer_params={'prefix': ..., 'encode': true} for "
                "each, then this one again."
            )
        if prefix is not None and prefix not in found:
            raise MissingEntriesError("The prefix was evicted. Encode a window behind it again.")
        self.cache.count(hits=len(wanted))
        return [found[key] for key in keys]

    def keep(self, prompt: WindowedPrompt, layers: Sequence[torch.Tensor], seconds: float) -> None:
        """Store a window that was encoded behind a prefix, and the prefix if it is not there.

        Args:
            prompt: of an encoding request.
            layers: per layer, (2, kv heads, tokens, head dim), of prefix and window.
            seconds: what computing them took.

        Raises:
            CacheError: they are no numbers.
        """
        prefix, windows = self._keys(prompt)
        start, end = len(prompt.prefix), prompt.read_tokens
        parts = [(windows[0], prompt.windows[0], start, end)]
        if prefix is not None and prefix not in self.cache and prefix not in self._recent:
            parts.append((prefix, prompt.prefix, 0, start))
        for key, ids, first, last in parts:
            host = [layer[:, :, first:last].cpu().contiguous() for layer in layers]
            keys, values = (tuple(layer[part] for layer in host) for part in (0, 1))
            window = Window(ids, first, keys, values)
            if not is_finite(window):
                raise CacheError(
                    "Keys or values of a window are NaN or infinite, so it was not stored. Load "
                    "the model in bfloat16 or float32."
                )
            entry = Entry(window, seconds * (last - first) / end, (), time.time())
            self.cache.keep(key, entry, self.cache.epoch)
            if key not in self._recent:
                self._recent[key] = window
                self._recent_bytes += entry.nbytes
        while self._recent_bytes > self._most_recent:
            _, window = self._recent.popitem(last=False)
            self._recent_bytes -= sum(one.nbytes for one in (*window.keys, *window.values))
        self.cache.count(misses=len(parts))

    def close(self) -> None:
        """Write what waits to be written."""
        self.cache.close()

    def _keys(self, prompt: WindowedPrompt) -> tuple[str | None, list[str]]:
        scope = KeyScope(
            self.cache.salt_key,
            model=self._model,
            tokenizer=self._tokenizer,
            encoding=_ENCODING,
            store=EXACT,
            prefix_ids=prompt.prefix,
        )
        start = len(prompt.prefix)
        prefix = scope.prefix_key() if prompt.prefix else None
        return prefix, [scope.window_key(ids, start) for ids in prompt.windows]


def files_fingerprint(folder: str | os.PathLike[str], *more: str) -> bytes:
    """A digest of all weights and settings in a model's folder, and of what else counts.

    Raises:
        InputError: there is no such folder, or it holds no weights.
    """
    paths = sorted(one for one in Path(folder).glob("*") if one.suffix in _WEIGHTS)
    if not any(one.suffix != ".json" for one in paths):
        raise InputError(
            f"{os.fspath(folder)!r} holds no weights to tell the model by. Give its folder as "
            "--model, or kv_connector_extra_config.model_fingerprint."
        )
    whole = hashlib.sha256(json.dumps(more).encode())
    for path in paths:
        whole.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.digest()
