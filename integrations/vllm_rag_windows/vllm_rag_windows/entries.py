"""Entries of prefixes and windows in a passage cache, and the options that say where it is."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ByteSize, ConfigDict, StringConstraints

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
from vllm_rag_windows.prompts import WindowedPrompt

SALT_VARIABLE = "RAG_WINDOWS_SALT"
"""Environment variable with the secret of `PassageCache`; vLLM logs its options, so it is none."""

_ENCODING = resolve("pcw").encoding
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".json", ".gguf")
_TOKEN_S = 0.0005  # encoding a token; the cache weighs entries by it

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class EntryOptions(BaseModel):
    """``kv_connector_extra_config``; docs/vllm.md says what each is."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    memory: int | str | None = "4GiB"
    path: str | None = None
    disk: int | str | None = None
    recent: ByteSize = ByteSize(1 << 30)
    model_fingerprint: Digest | None = None
    tokenizer_fingerprint: Digest = NO_TOKENIZER.hex()


class Entries:
    """Encoded prefixes and windows of one model, by its fingerprint of 32 bytes, in a cache.

    A question must find what has just been encoded for it. The cache decides by itself what is
    worth keeping, so the latest entries are held outside of it, too.
    """

    def __init__(self, options: EntryOptions, model: bytes) -> None:
        salt = os.environ.get(SALT_VARIABLE) or None
        self.cache = PassageCache(options.memory, options.disk, options.path, salt=salt)
        self._model, self._tokenizer = model, bytes.fromhex(options.tokenizer_fingerprint)
        self._recent: OrderedDict[str, Entry] = OrderedDict()
        self._recent_bytes, self._most_recent = 0, int(options.recent)

    def find(self, prompt: WindowedPrompt) -> list[Window]:
        """The prefix, unless it is empty, and the windows, in order.

        Raises:
            CacheError: not all of them are there.
        """
        keys = self._keys(prompt)
        wanted = [*dict.fromkeys(keys.values())]
        found = self.cache.quick(wanted)
        for key in [key for key in wanted if key in self._recent]:
            self._recent.move_to_end(key)
            found[key] = self._recent[key]
        found |= self.cache.from_disk([key for key in wanted if key not in found])
        if missing := [name for name, key in keys.items() if key not in found]:
            raise CacheError(
                f"Not encoded, or evicted: {missing}. Send a request of prefix and window with "
                "kv_transfer_params={'prefix': ..., 'encode': true} for each window, or for any "
                "one if it is the prefix, then this request again."
            )
        return [found[key].window for key in keys.values()]

    def keep(self, prompt: WindowedPrompt, layers: Sequence[torch.Tensor]) -> None:
        """Store the window of an encoding request, and the prefix if it is not there.

        Args:
            layers: per layer, (2, kv heads, tokens, head dim), of prefix and window.

        Raises:
            CacheError: they are no numbers.
        """
        keys = self._keys(prompt)
        parts = [(keys["window 0"], prompt.windows[0], len(prompt.prefix))]
        prefix = keys.get("prefix")
        if prefix is not None and prefix not in self.cache and prefix not in self._recent:
            parts.append((prefix, prompt.prefix, 0))
        for key, ids, start in parts:
            host = [layer[:, :, start : start + len(ids)].cpu().contiguous() for layer in layers]
            own = [tuple(one[part] for one in host) for part in (0, 1)]
            window = Window(ids, start, own[0], own[1])
            if not is_finite(window):
                raise CacheError(
                    "Keys or values of a window are NaN or infinite, so it was not stored. Load "
                    "the model in bfloat16 or float32."
                )
            entry = Entry(window, len(ids) * _TOKEN_S, (), time.time())
            self.cache.keep(key, entry, self.cache.epoch)
            if key not in self._recent:
                self._recent[key] = entry
                self._recent_bytes += entry.nbytes
        while self._recent_bytes > self._most_recent:
            self._recent_bytes -= self._recent.popitem(last=False)[1].nbytes

    def _keys(self, prompt: WindowedPrompt) -> dict[str, str]:
        """Keys of the prefix, unless it is empty, and of the windows."""
        scope = KeyScope(
            self.cache.salt_key,
            model=self._model,
            tokenizer=self._tokenizer,
            encoding=_ENCODING,
            store=EXACT,
            prefix_ids=prompt.prefix,
        )
        keys = {"prefix": scope.prefix_key()} if prompt.prefix else {}
        for number, ids in enumerate(prompt.windows):
            keys[f"window {number}"] = scope.window_key(ids, len(prompt.prefix))
        return keys


def files_fingerprint(folder: Path, *more: str) -> bytes:
    """A digest of all weights and settings in a model's folder, and of what else counts.

    Raises:
        InputError: there is no such folder, or it holds no weights.
    """
    paths = sorted(one for one in folder.glob("*") if one.suffix in _WEIGHTS)
    if all(one.suffix == ".json" for one in paths):
        raise InputError(
            f"{str(folder)!r} holds no weights to tell the model by. Give its folder as --model, "
            "or kv_connector_extra_config.model_fingerprint."
        )
    whole = hashlib.sha256(json.dumps(more).encode())
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        whole.update(path.name.encode() + b"\0" + digest)
    return whole.digest()
