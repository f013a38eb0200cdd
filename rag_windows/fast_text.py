"""Plain text to ids with a tokenizer of the Rust library, without its added tokens."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from tokenizers import Encoding, Regex, Tokenizer, models, pre_tokenizers

from rag_windows.control_tokens import ControlTokens, any_of
from rag_windows.forks import cached_property

At = Literal["start", "control", "text"]
"""What stands before a piece: nothing, a control token, or more text."""


class FastText:
    """Encodes text through private copies of a tokenizer's stages.

    A tokenizer of the Rust library first cuts added tokens out of the text, then normalizes, splits
    and looks up what is left. Here that first step is missing, so a control token's spelling is
    read as any other text. Where the vocabulary itself holds such a spelling (SentencePiece
    pieces), one more splitter separates its first character from the rest. The vocabulary is shared
    with the original, not copied, and nothing of the original is changed, so that threads may use
    both.

    A dummy prefix (the space that SentencePiece tokenizers put before a text) is put only where the
    tokenizer puts it in one whole prompt: never in the middle of text.
    """

    def __init__(self, backend: Tokenizer, controls: ControlTokens) -> None:
        self._backend = backend
        self._controls = controls
        self._model = backend.model
        self._stages = {"start": _stages(backend)}
        self._stages["text"] = _without_prefix(self._stages["start"])
        first_only = _prefixes_first_only(self._stages["start"])
        self._stages["control"] = self._stages["text" if first_only else "start"]
        self._made: dict[tuple[str, bool], tuple[Tokenizer, dict[int, int]]] = {}

    def reads_on(self, at: At) -> bool:
        """Whether a whole prompt can be read behind what stands there.

        The dummy prefix can't be left out of its beginning alone where it is also put behind each
        control token.
        """
        return at != "text" or self._stages["control"] == self._stages["text"]

    def whole(self, text: str, at: At) -> list[int]:
        """Ids with control tokens read, as the original tokenizer reads a rendered prompt."""
        return self._read(text, at).ids

    def placed(self, text: str, at: At) -> tuple[list[int], list[tuple[int, int]]]:
        """The same, and for each id the characters that made it: the first one and the next."""
        encoding = self._read(text, at)
        return encoding.ids, encoding.offsets

    def _read(self, text: str, at: At) -> Encoding:
        ordinary = at == "start" or self._stages["text"] == self._stages["start"]
        tokenizer = self._whole if ordinary else self._whole_continued
        return tokenizer.encode(text, add_special_tokens=False)

    def plain(self, text: str, at: At) -> list[int]:
        """Ids of plain text; the caller checks that no control token is among them."""
        ids = self._encode(text, at, split=False)
        if not self._leaks(text, ids):
            return ids
        return self._encode(text, at, split=True)

    def _encode(self, text: str, at: At, *, split: bool) -> list[int]:
        # Modes whose stages are equal share one tokenizer.
        key = "start" if self._stages[at] == self._stages["start"] else "text"
        made = self._made.get((key, split))
        if made is None:
            made = self._made[key, split] = self._make(self._stages[at], split=split)
        tokenizer, true_ids = made
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return [true_ids.get(i, i) for i in ids] if true_ids else ids

    def _leaks(self, text: str, ids: list[int]) -> bool:
        found = set(ids)
        if found & self._controls.ids:
            return True
        # These two may come out of other characters too: look whether their names are in the text.
        return any(
            not found.isdisjoint(names.values()) and self._spells(text, names)
            for names in (self._unknown, self._bytes)
        )

    def _spells(self, text: str, names: dict[str, int]) -> bool:
        normalizer = self._backend.normalizer
        variants = [text] if normalizer is None else [text, normalizer.normalize_str(text)]
        return any(name in variant for variant in variants for name in names)

    @cached_property
    def _names(self) -> list[str]:
        """Spellings inside the vocabulary that text must not be matched with as a whole."""
        names = {self._model.id_to_token(i) for i in self._controls.ids}
        names |= self._unknown.keys() | self._bytes.keys()
        return sorted(name for name in names if name and len(name) > 1)

    @cached_property
    def _unknown(self) -> dict[str, int]:
        """The unknown token by name, the vocabulary's own where the tokenizer declares none."""
        names = [getattr(self._model, "unk_token", None)]
        names += [self._controls.unknown[0]] if self._controls.unknown else []
        return self._ids(name for name in names if isinstance(name, str))

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """Byte tokens by name: ``<0x0A>`` written out would come back as the byte itself."""
        return self._ids(f"<0x{byte:02X}>" for byte in range(256))

    def _ids(self, names: Iterable[str]) -> dict[str, int]:
        ids = {name: self._model.token_to_id(name) for name in names}
        return {name: id_ for name, id_ in ids.items() if id_ is not None}

    def _make(self, stages: str, *, split: bool) -> tuple[Tokenizer, dict[int, int]]:
        tokenizer = Tokenizer(self._model)
        parts = Tokenizer.from_str(stages)
        splitters = [parts.pre_tokenizer] if parts.pre_tokenizer is not None else []
        if split and self._names:
            rest: dict[str, list[str]] = {}
            for name in self._names:
                rest.setdefault(name[0], []).append(name[1:])
            breaks = (f"{re.escape(first)}(?={any_of(tail)})" for first, tail in rest.items())
            splitters.append(pre_tokenizers.Split(Regex("|".join(breaks)), "isolated"))
        if parts.normalizer is not None:
            tokenizer.normalizer = parts.normalizer
        if splitters:
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
        # The library numbers added tokens anew, without those that are left out here.
        true_ids: dict[int, int] = {}
        for content, token in self._controls.text_tokens.items():
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
            got, wanted = tokenizer.token_to_id(content), self._backend.token_to_id(content)
            if got is not None and wanted is not None and got != wanted:
                true_ids[got] = wanted
        return tokenizer, true_ids

    @cached_property
    def _whole(self) -> Tokenizer:
        tokenizer = copy.deepcopy(self._backend)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = False
        return tokenizer

    @cached_property
    def _whole_continued(self) -> Tokenizer:
        tokenizer = copy.deepcopy(self._whole)
        parts = Tokenizer.from_str(self._stages["text"])
        tokenizer.normalizer = parts.normalizer
        tokenizer.pre_tokenizer = parts.pre_tokenizer
        return tokenizer


def _stages(backend: Tokenizer) -> str:
    """The normalizer and the splitter alone, as the JSON of a tokenizer without vocabulary."""
    empty = Tokenizer(models.BPE())
    if backend.normalizer is not None:
        empty.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        empty.pre_tokenizer = backend.pre_tokenizer
    return empty.to_str()


def _without_prefix(stages: str) -> str:
    tree = json.loads(stages)
    normalizer = tree["normalizer"]
    if normalizer is not None and normalizer["type"] == "Prepend":
        tree["normalizer"] = None
    elif normalizer is not None and normalizer["type"] == "Sequence":
        parts = [part for part in normalizer["normalizers"] if part["type"] != "Prepend"]
        tree["normalizer"] = {**normalizer, "normalizers": parts} if parts else None
    # Behind another splitter the "prefix" stands for the space between two words: it stays.
    first = _first_splitter(tree)
    if first.get("type") == "Metaspace":
        first["prepend_scheme"] = "never"
    elif first.get("type") == "ByteLevel":
        first["add_prefix_space"] = False
    return json.dumps(tree)


def _prefixes_first_only(stages: str) -> bool:
    tree = json.loads(stages)
    return _first_splitter(tree).get("prepend_scheme") == "first" and '"Prepend"' not in stages


def _first_splitter(tree: dict[str, Any]) -> dict[str, Any]:
    splitter = tree["pre_tokenizer"] or {}
    if splitter.get("type") == "Sequence":
        return splitter["pretokenizers"][0] if splitter["pretokenizers"] else {}
    return splitter
