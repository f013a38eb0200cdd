"""Text becomes ids here, and control tokens do not come out of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from tokenizers import Encoding, Regex, Tokenizer, models, pre_tokenizers

from rag_windows.errors import PromptError
from rag_windows.threads import cached_property


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of one tokenizer.

    Attributes:
        by_content: spelling -> id of every control token.
        unknown: spelling and id of the unknown token where unknown characters may produce it.
        text_tokens: spelling -> added token object of those that count as ordinary text.
        strips: spelling -> (eats white space before it, after it), where one of them is true.
    """

    by_content: Mapping[str, int]
    unknown: tuple[str, int] | None
    text_tokens: Mapping[str, Any]
    strips: Mapping[str, tuple[bool, bool]]

    @classmethod
    def of(cls, tokenizer: Any, text_tokens: Collection[str] = ()) -> ControlTokens:
        """Read them off a transformers tokenizer.

        Args:
            tokenizer: a ``PreTrainedTokenizerBase``.
            text_tokens: spellings of special or added tokens that text may produce.

        Raises:
            PromptError: a name in ``text_tokens`` is no special or added token.
        """
        added = {token.content: (id_, token) for id_, token in _added(tokenizer).items()}
        ids = {content: id_ for content, (id_, _) in added.items()}
        for content, id_ in zip(
            tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True
        ):
            # A special token that the vocabulary lacks has the unknown token's id, or none.
            if id_ is not None and (
                id_ != tokenizer.unk_token_id or content == tokenizer.unk_token
            ):
                ids.setdefault(str(content), id_)
        strangers = sorted(set(text_tokens) - ids.keys())
        if strangers:
            raise PromptError(
                f"text_tokens names {strangers}, which are no special or added tokens of this "
                "tokenizer; leave them out."
            )
        kept = {
            content: token
            for content, (_, token) in added.items()
            if content in text_tokens or (not token.special and _blank(content))
        }
        unknown = _unknown(tokenizer)
        harmless = {ids[name] for name in (*kept, *text_tokens)}
        if unknown:
            harmless.add(unknown[1])
        control = {content: id_ for content, id_ in ids.items() if id_ not in harmless}
        strips = {
            content: (token.lstrip, token.rstrip)
            for content, (_, token) in added.items()
            if token.lstrip or token.rstrip
        }
        return cls(control, unknown, kept, strips)

    @cached_property
    def ids(self) -> frozenset[int]:
        """Ids that text must never produce."""
        return frozenset(self.by_content.values())

    @cached_property
    def spelled(self) -> re.Pattern[str]:
        """Matches a control token's spelling, or the unknown token's, the longest first."""
        names = list(self.by_content)
        if self.unknown:
            names.append(self.unknown[0])
        return re.compile(any_of(names))

    def name(self, id_: int) -> str:
        """Spelling of a control token, for messages."""
        return next((name for name, i in self.by_content.items() if i == id_), f"id {id_}")


def any_of(strings: Iterable[str]) -> str:
    """Regular expression matching any of the strings, as a prefix tree; the longest match wins.

    A flat alternation of the thousands of reserved tokens that some vocabularies hold would be
    tried one by one at every position.
    """
    tree: dict[str, Any] = {}
    for string in strings:
        node = tree
        for character in string:
            node = node.setdefault(character, {})
        if string:
            node[""] = {}
    return _pattern(tree) if tree else r"(?!)"


def _pattern(tree: dict[str, Any]) -> str:
    prefix = ""
    while len(tree) == 1 and "" not in tree:  # unbranched: no recursion for long tokens
        character, tree = next(iter(tree.items()))
        prefix += re.escape(character)
    branches = [re.escape(c) + _pattern(node) for c, node in sorted(tree.items()) if c]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


def _added(tokenizer: Any) -> Mapping[int, Any]:
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    return decoder if isinstance(decoder, Mapping) else {}


def _blank(content: str) -> bool:
    return content.replace("▁", " ").isspace()


def _unknown(tokenizer: Any) -> tuple[str, int] | None:
    if tokenizer.unk_token is None or tokenizer.unk_token_id is None:
        return None
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    named = isinstance(model, models.Model) and not isinstance(model, models.Unigram)
    if named and getattr(model, "unk_token", None) != tokenizer.unk_token:
        return None  # declared, but no character gives it: byte-level vocabularies
    names = ("bos_token", "eos_token", "sep_token", "cls_token", "mask_token")
    if any(getattr(tokenizer, name, None) == tokenizer.unk_token for name in names):
        return None
    return str(tokenizer.unk_token), int(tokenizer.unk_token_id)


At = Literal["start", "control", "text"]
"""What stands before a piece: nothing, a control token, or more text."""

Span = tuple[int, int, int]
"""First character of a control token, the one behind its last, and its id."""


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


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt.

    Attributes:
        text: its characters.
        trusted: whether the template wrote it, so that control tokens in it are meant.
    """

    text: str
    trusted: bool = False


class Boundary:
    """The one place where text turns into ids.

    Args:
        tokenizer: a transformers tokenizer, fast or Python.
        text_tokens: spellings of special or added tokens that text may produce after all.

    Raises:
        PromptError: a tokenizer of another kind, or an unknown name in ``text_tokens``.
    """

    def __init__(self, tokenizer: Any, text_tokens: Collection[str] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer) and not hasattr(tokenizer, "tokens_trie"):
            raise PromptError(
                f"{type(tokenizer).__name__} is no tokenizer whose control tokens can be kept out "
                "of text; load it as transformers.PreTrainedTokenizerFast (from a tokenizer.json) "
                "or as one of transformers' Python tokenizers."
            )
        self.controls = ControlTokens.of(tokenizer, text_tokens)
        self._text: FastText | PythonText = (
            FastText(backend, self.controls)
            if isinstance(backend, Tokenizer)
            else PythonText(tokenizer, self.controls)
        )

    def encode(self, text: str, at: At = "start") -> list[int]:
        """Ids of untrusted text: the ordinary ones, where those hold no control token.

        Args:
            text: any text.
            at: what stands before it. ``start`` (nothing) gives exactly the ids of
                ``tokenizer(text, add_special_tokens=False)``; ``text`` leaves out the dummy prefix
                that SentencePiece tokenizers put before a text.

        Raises:
            PromptError: a character of the text is itself a control token of this tokenizer, or is
                half a surrogate pair.
        """
        if not text:
            return []
        _check_characters(text)
        ids = self._text.plain(text, at)
        leaked = self.controls.ids.intersection(ids)
        if leaked:
            name = self.controls.name(min(leaked))
            raise PromptError(
                f"This tokenizer spells ordinary text with its control token {name!r}, so the text "
                f"can't be encoded without it. Remove {name!r} from the text, give the tokenizer "
                f"another special token, or allow it with Prompt(..., text_tokens=[{name!r}])."
            )
        return ids

    def encode_pieces(self, pieces: Sequence[Piece], at: At = "start") -> list[int]:
        """Ids of a prompt made of trusted and untrusted stretches.

        Where the control tokens in it are the template's own, each in the place where the template
        wrote it, the ids are those of the whole text in one go, merges over the borders included.
        Otherwise, and with a Python tokenizer (it tells no places), the prompt is cut at the
        template's control tokens, and what stands between them is encoded as untrusted text.

        Args:
            pieces: the prompt in order; their texts are joined without anything between.
            at: what stands before the first piece.

        Raises:
            PromptError: as ``encode``.
        """
        text = "".join(piece.text for piece in pieces)
        if not text:
            return []
        _check_characters(text)
        controls: list[Span] = []
        untrusted: list[tuple[int, int]] = []
        ends = accumulate(len(piece.text) for piece in pieces)
        for piece, end in zip(pieces, ends, strict=True):
            begin = end - len(piece.text)
            if piece.trusted:
                found = self._control_spans(piece.text)
                controls += [(begin + start, begin + stop, id_) for start, stop, id_ in found]
            elif piece.text:
                untrusted.append((begin, end))
        whole = self._in_one_go(text, controls, untrusted, at)
        if whole is not None:
            return whole
        ids: list[int] = []
        position = 0
        for start, stop, id_ in controls:
            ids += [*self.encode(text[position:start], at), id_]
            position, at = stop, "control"
        return ids + self.encode(text[position:], at)

    def _in_one_go(
        self,
        text: str,
        controls: Sequence[Span],
        untrusted: Sequence[tuple[int, int]],
        at: At,
    ) -> list[int] | None:
        """Ids of the whole text, if its control tokens are the template's own, each in its place.

        Their list alone says too little: a normalizer may join the template's own token with the
        first character of a message, and make the same token out of other characters behind it.
        """
        reader = self._text
        if not isinstance(reader, FastText) or not reader.reads_on(at):
            return None
        spelled = [match.span(1) for match in self._overlapping.finditer(text)]
        if any(start < last and first < end for start, end in spelled for first, last in untrusted):
            return None
        ids, places = reader.placed(text, at)
        # An unknown token may stand for an unknown character or for its own name: cut, to know.
        if self.controls.unknown is not None and self.controls.unknown[1] in ids:
            return None
        got = [(*p, id_) for p, id_ in zip(places, ids, strict=True) if id_ in self.controls.ids]
        same = len(got) == len(controls) and all(
            one == other and _same_place(text, (a, b), (c, d))
            for (a, b, one), (c, d, other) in zip(got, controls, strict=True)
        )
        return ids if same else None

    def _control_spans(self, text: str) -> list[Span]:
        """A template's control tokens, with the spaces that they eat."""
        spans: list[Span] = []
        for match in self.controls.spelled.finditer(text):
            id_ = self.controls.by_content.get(match[0])
            # Some added tokens count only where they stand alone or between spaces: ask.
            if id_ is not None and id_ in self._text.whole(match[0], "start"):
                left, right = self.controls.strips.get(match[0], (False, False))
                before, after = text[: match.start()], text[match.end() :]
                start = len(before.rstrip()) if left else match.start()
                end = len(text) - len(after.lstrip()) if right else match.end()
                spans.append((max(start, spans[-1][1] if spans else 0), end, id_))
        return spans

    @cached_property
    def _overlapping(self) -> re.Pattern[str]:
        return re.compile(f"(?=({self.controls.spelled.pattern}))")


def _same_place(text: str, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two spans meet and differ only by white space, which a control token may eat."""
    (a, b), (c, d) = one, other
    apart = text[min(a, c) : max(a, c)] + text[min(b, d) : max(b, d)]
    return a < d and c < b and not apart.strip()


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"Character {error.start} of the text is half of a surrogate pair, which no tokenizer "
            "can read. Decode the text again from its bytes, or drop the character with "
            "text.encode(errors='replace').decode()."
        ) from error
