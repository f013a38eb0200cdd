"""Text becomes ids here, and control tokens do not come out of it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from tokenizers import AddedToken, Encoding, Tokenizer, models, normalizers, pre_tokenizers

from rag_windows.errors import PromptError
from rag_windows.threads import cached_property

At = Literal["start", "control", "text"]
"""What stands before a text: nothing, a control token, or more text."""

Place = tuple[int, int]
"""The first character that a token is made of, and the one behind the last."""

Span = tuple[int, int, int]
"""The place of a token, and its id."""


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of one tokenizer, by their spelling.

    `harmless` ones text may come to, but not by spelling their names: the unknown token, and bytes
    such as ``<0x0A>``.
    """

    by_content: Mapping[str, int]
    harmless: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Any, text_tokens: Collection[str] = ()) -> ControlTokens:
        """Read them off a tokenizer; arguments as of `Boundary`."""
        added = added_tokens(tokenizer)
        ids = {content: id_ for content, (id_, _) in added.items()}
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        for content, id_ in special:
            # A special token that the vocabulary lacks has the unknown token's id, or none.
            if id_ is not None and (
                id_ != tokenizer.unk_token_id or content == tokenizer.unk_token
            ):
                ids.setdefault(str(content), id_)
        if strangers := sorted(set(text_tokens) - ids.keys()):
            raise PromptError(
                f"text_tokens names {strangers}, which are no special or added tokens of this "
                "tokenizer; leave them out."
            )
        # Runs of spaces that a tokenizer has tokens for are ordinary text.
        spaces = {name for name, (_, one) in added.items() if not one.special and _blank(name)}
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        harmless: dict[str, int] = {}
        if isinstance(model, models.Model):
            names = [getattr(model, "unk_token", None), *(f"<0x{i:02X}>" for i in range(256))]
            found = {name: model.token_to_id(name) for name in names if isinstance(name, str)}
            harmless = {name: id_ for name, id_ in found.items() if id_ is not None}
        text = {ids[name] for name in spaces.union(text_tokens)}
        if _has_unknown(tokenizer, model):
            text.add(tokenizer.unk_token_id)
            harmless[str(tokenizer.unk_token)] = tokenizer.unk_token_id
        control = {content: id_ for content, id_ in ids.items() if id_ not in text}
        forbidden = set(control.values())
        return cls(control, {name: i for name, i in harmless.items() if i not in forbidden})

    @cached_property
    def ids(self) -> frozenset[int]:
        """Ids that text must never produce."""
        return frozenset(self.by_content.values())

    @cached_property
    def watched(self) -> Mapping[int, str]:
        """Ids of control and harmless tokens, with their spellings."""
        return {id_: name for name, id_ in (*self.by_content.items(), *self.harmless.items())}

    def spelled(self, text: str) -> list[Place]:
        """Where names of control and harmless tokens stand in a text, in any case of letters."""
        return self._names.encode(text).offsets

    @cached_property
    def _names(self) -> Tokenizer:
        # The library looks for thousands of added tokens at once; its empty vocabulary drops the
        # rest. Case is ignored because many tokenizers lower it before they look words up.
        finder = Tokenizer(models.BPE())
        finder.normalizer = normalizers.Lowercase()
        names = (*self.by_content, *self.harmless)
        finder.add_tokens([AddedToken(name, normalized=True) for name in names])
        return finder


def added_tokens(tokenizer: Any) -> dict[str, tuple[int, Any]]:
    """Spelling -> id and added-token object."""
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    found = decoder.items() if isinstance(decoder, Mapping) else ()
    return {token.content: (id_, token) for id_, token in found}


def _blank(content: str) -> bool:
    return content.replace("▁", " ").isspace()


def _has_unknown(tokenizer: Any, model: Any) -> bool:
    """Whether characters may come to the unknown token, and it means nothing else."""
    if tokenizer.unk_token is None or tokenizer.unk_token_id is None:
        return False
    named = isinstance(model, models.Model) and not isinstance(model, models.Unigram)
    if named and getattr(model, "unk_token", None) != tokenizer.unk_token:
        return False  # declared, but no character gives it: byte-level vocabularies
    roles = ("bos_token", "eos_token", "sep_token", "cls_token", "mask_token")
    return all(getattr(tokenizer, role, None) != tokenizer.unk_token for role in roles)


class FastReader:
    """A tokenizer of the Rust library, which tells the characters that each token was made of.

    It works on copies: a dummy prefix (the space that SentencePiece tokenizers put before a text)
    is put only where the tokenizer puts it in one whole prompt, never in the middle of text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._whole = copy.deepcopy(backend)
        self._whole.no_truncation()
        self._whole.no_padding()
        self._whole.encode_special_tokens = False

    def read(self, text: str, at: At) -> tuple[list[int], Encoding]:
        """Ids, and what tells the characters that each was made of."""
        encoding = self._tokenizers[at].encode(text, add_special_tokens=False)
        return encoding.ids, encoding

    def reads_whole(self, at: At) -> bool:
        """Whether a prompt that stands there can be read in one go.

        Not behind text where a dummy prefix is put behind each control token: it can't be left out
        at the beginning alone.
        """
        return at != "text" or self._tokenizers["control"] is self._tokenizers["text"]

    @cached_property
    def _tokenizers(self) -> dict[At, Tokenizer]:
        start = text = self._whole
        normalizer, splitter, prefixed = _without_prefix(start)
        if prefixed != "never":
            text = copy.deepcopy(start)
            text.normalizer, text.pre_tokenizer = normalizer, splitter
        return {"start": start, "control": start if prefixed == "always" else text, "text": text}


def _without_prefix(tokenizer: Tokenizer) -> tuple[Any, Any, str]:
    """Normalizer and splitter without the dummy prefix, and whether it was put.

    Which is "never", "first" (at the very start alone), or "always" (behind control tokens too).
    """
    prefixed = "never"
    stages: Any = tokenizer.normalizer
    several = isinstance(stages, normalizers.Sequence)
    parts = list(stages) if several else [stages]
    rest = [part for part in parts if not isinstance(part, normalizers.Prepend)]
    if len(rest) < len(parts):
        prefixed, stages = "always", normalizers.Sequence(rest) if rest else None
    splitter: Any = copy.deepcopy(tokenizer.pre_tokenizer)
    # Behind another splitter the "prefix" stands for the space between two words: it stays.
    several = isinstance(splitter, pre_tokenizers.Sequence)
    first = next(iter(list(splitter)), None) if several else splitter
    if isinstance(first, pre_tokenizers.Metaspace):
        prefixed = first.prepend_scheme if prefixed == "never" else prefixed
        first.prepend_scheme = "never"
    elif isinstance(first, pre_tokenizers.ByteLevel):
        prefixed = "always" if first.add_prefix_space else prefixed
        first.add_prefix_space = False
    return stages, splitter, prefixed


# Protocol buffers merge when they are joined, and the last value counts. This one is
# `ModelProto { normalizer_spec (field 3) { add_dummy_prefix (field 3): false } }`; writing it out
# saves the dependency on protobuf.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class PythonReader:
    """A tokenizer that transformers runs in Python, which tells no places."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def read(self, text: str, at: At) -> tuple[list[int], None]:
        """Ids alone."""
        tokenizer = self._continued if at == "text" else self._tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False)), None

    def reads_whole(self, at: At) -> bool:
        """Never: see `FastReader.reads_whole`."""
        return False

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

    Text is read as the tokenizer reads it. Where a control token comes out, the text is cut behind
    the first character of that token, and the parts are read, until none comes out any more.

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
        self._added = added_tokens(tokenizer)
        self._normalizer = getattr(backend, "normalizer", None)
        self._reader: FastReader | PythonReader = (
            FastReader(backend) if isinstance(backend, Tokenizer) else PythonReader(tokenizer)
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
        _check_characters(text)
        return self._untrusted(text, at) if text else []

    def _untrusted(self, text: str, at: At) -> list[int]:
        ids, found = self._read(text, at)
        cuts = {cut for start, end, _ in found for cut in _inside(text, start, end)}
        leaked = self.controls.ids.intersection(ids)
        if leaked and not cuts:
            # A spelling that only the tokenizer knows: its place is found by halves.
            if len(text) == 1:
                name = self.controls.watched[min(leaked)]
                raise PromptError(
                    f"This tokenizer spells ordinary text with its control token {name!r}. Remove "
                    f"{name!r} from the text, give the tokenizer another special token, or allow "
                    f"it with Prompt(..., text_tokens=[{name!r}])."
                )
            cuts = {len(text) // 2}
        if cuts:
            ids = []
            for start, end in pairwise([0, *sorted(cuts), len(text)]):
                ids += self._untrusted(text[start:end], at if start == 0 else "text")
        return ids

    def encode_pieces(self, pieces: Sequence[Piece], at: At = "start") -> list[int]:
        """Ids of a prompt made of trusted and untrusted stretches, in order.

        Where the control tokens in it are the template's own, each in the place where the template
        wrote it, the ids are those of the whole text in one go, merges over the borders included.
        Otherwise, and with a Python tokenizer (it tells no places), the prompt is cut at the
        template's control tokens, and what stands between them is encoded as untrusted text.
        """
        text = "".join(piece.text for piece in pieces)
        _check_characters(text)
        if not text:
            return []
        own: list[Span] = []
        begin = 0
        for piece in pieces:
            if piece.trusted:
                named = self._named(piece.text)
                own += [(begin + start, begin + end, id_) for start, end, id_ in named]
            begin += len(piece.text)
        if self._reader.reads_whole(at):
            ids, found = self._read(text, at)
            # Comparing ids alone says too little: a normalizer may join the template's own token
            # with the first character of a message, and make it out of other characters later.
            if [_trimmed(text, span) for span in found] == [_trimmed(text, span) for span in own]:
                return ids
        ids, position = [], 0
        for start, end, id_ in own:
            ids += [*self.encode(text[position:start], at), id_]
            position, at = end, "control"
        return ids + self.encode(text[position:], at)

    def spelled(self, text: str) -> str | None:
        """The first control token that is written in a text, as it is spelled there."""
        return next((text[start:end] for start, end, _ in self._named(text)), None)

    def _read(self, text: str, at: At) -> tuple[list[int], list[Span]]:
        """Ids, with the places of control tokens and of harmless ones whose names are spelled."""
        ids, encoding = self._reader.read(text, at)
        if self.controls.watched.keys().isdisjoint(ids):
            return ids, []
        if encoding is not None:
            found = [(*place, id_) for place, id_ in zip(encoding.offsets, ids, strict=True)]
            return ids, [span for span in found if self._is_spelled(text, span)]
        return ids, self._named(text)

    def _is_spelled(self, text: str, span: Span) -> bool:
        """Whether a token is a control token, or a harmless one made out of its name."""
        start, end, id_ = span
        if id_ in self.controls.ids:
            return True
        name, piece = self.controls.watched.get(id_), text[start:end]
        if name is None or len(piece) < 2:
            return False
        return name in piece or bool(
            self._normalizer and name in self._normalizer.normalize_str(piece)
        )

    def _named(self, text: str) -> list[Span]:
        """Control tokens that are written by their names, with the spaces that they eat."""
        spans: list[Span] = []
        for start, end in self.controls.spelled(text):
            name = text[start:end]
            harmless = self.controls.harmless.get(name)
            ids = self._reader.read(name, "start")[0]
            # Some added tokens count only where they stand alone or between spaces: ask.
            made = [id_ for id_ in ids if id_ in self.controls.ids or id_ == harmless]
            if made:
                token = self._added[name][1] if name in self._added else None
                if token and token.lstrip:
                    start = len(text[:start].rstrip())
                if token and token.rstrip:
                    end = len(text) - len(text[end:].lstrip())
                spans.append((max(start, spans[-1][1] if spans else 0), end, made[0]))
        return spans


def _inside(text: str, start: int, end: int) -> list[int]:
    """Where a token is cut in two: behind its first character that is no space, if more follow."""
    piece = text[start:end].strip() or text[start:end]
    cut = text.index(piece, start) + 1
    return [cut] if len(piece) > 1 else []


def _trimmed(text: str, span: Span) -> Span:
    """A token's place without the white space that it eats."""
    start, end, id_ = span
    piece = text[start:end]
    return end - len(piece.lstrip()), start + len(piece.rstrip()), id_


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"Character {error.start} of the text is half of a surrogate pair, which no tokenizer "
            "can read. Decode the text again from its bytes, or drop the character with "
            "text.encode(errors='replace').decode()."
        ) from error
