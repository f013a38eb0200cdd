"""Text to token ids, so that untrusted text gives no control tokens."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from rag_windows.errors import PromptError

At = Literal["start", "control", "text"]
"""What stands before a text: nothing, a control token, or more text."""

Span = tuple[int, int, int]
"""The first character that a token is made of, the one behind the last, and the token's id."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt; trusted if the template wrote it and means its control tokens."""

    text: str
    trusted: bool = False


class Boundary:
    """The only place where text turns into ids.

    Text is read as the tokenizer reads it. Where a control token comes out, the text is cut behind
    the first character of that token, and the parts are read, until none comes out any more.
    ``text_tokens`` spell special or added tokens that text may produce after all; ``controls`` are
    all others, spelling -> id.
    """

    def __init__(self, tokenizer: Any, text_tokens: Collection[str] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise PromptError(
                f"{type(tokenizer).__name__} does not say which characters its tokens are made "
                "of, so control tokens can't be kept out of text. Load a fast tokenizer, such as "
                "transformers.PreTrainedTokenizerFast with a tokenizer.json."
            )
        # A copy: others may set truncation or padding while this one reads.
        self._whole = copy.deepcopy(backend)
        self._whole.no_truncation()
        self._whole.no_padding()
        self._whole.encode_special_tokens = False
        names = _control_tokens(tokenizer, text_tokens)
        # Characters may come to bytes and to the unknown token, but not by spelling their names.
        bytes_ = {backend.token_to_id(name): name for name in map("<0x{:02X}>".format, range(256))}
        self._spelled: dict[int | None, str] = {
            id_: name for id_, name in bytes_.items() if id_ not in names.values()
        }
        if _has_unknown(tokenizer, backend.model):
            self._spelled[tokenizer.unk_token_id] = str(tokenizer.unk_token)
        self.controls: Mapping[str, int] = {
            name: id_ for name, id_ in names.items() if id_ not in self._spelled
        }
        self._forbidden = frozenset(self.controls.values())
        # A dummy prefix is put only where the tokenizer puts it in one whole prompt.
        start = text = self._whole
        normalizer, splitter, prefixed = _without_prefix(start)
        if prefixed != "never":
            text = copy.deepcopy(start)
            text.normalizer, text.pre_tokenizer = normalizer, splitter
        control = start if prefixed == "always" else text
        self._tokenizers: dict[At, Tokenizer] = {"start": start, "control": control, "text": text}

    def encode(self, text: str, at: At = "start") -> list[int]:
        """Ids of untrusted text: the ordinary ones, where those hold no control token.

        At the ``start`` they are those of ``tokenizer(text, add_special_tokens=False)``; behind
        other text the dummy prefix of SentencePiece tokenizers is left out.
        """
        ids, found = self._read(text, at)
        cuts = {cut for span in found for cut in _inside(text, span)}
        leaked = self._forbidden.intersection(ids)
        if leaked and not cuts and len(text) > 1:
            # Some normalizers lose character offsets: the place is found by bisection.
            cuts = {len(text) // 2}
        elif leaked and not cuts:
            name = next(name for name, id_ in self.controls.items() if id_ in leaked)
            raise PromptError(
                f"This tokenizer writes ordinary text with its control token {name!r}. Remove "
                f"{name!r} from the text, give the tokenizer another special token, or allow it "
                f"with text_tokens=[{name!r}]."
            )
        if cuts:
            ids = []
            for start, end in pairwise([0, *sorted(cuts), len(text)]):
                ids += self.encode(text[start:end], at if start == 0 else "text")
        return ids

    def encode_plain(self, texts: Sequence[str], at: At = "start") -> list[list[int] | None]:
        """What `encode` gives for each text, all in one go; None for those that it must read.

        That is text whose ids hold a control token, or that is no Unicode. Without the places of
        tokens, several at once and outside of Python's lock, reading takes half the time.
        """
        readable = [text if _surrogate(text) is None else None for text in texts]
        given = ["" if text is None else text for text in readable]
        read = self._tokenizers[at].encode_batch_fast(given, add_special_tokens=False)
        return [
            one.ids if text is not None and self._is_plain(one.ids) else None
            for text, one in zip(readable, read, strict=True)
        ]

    def encode_pieces(self, pieces: Sequence[Piece], at: At = "start") -> list[int]:
        """Ids of a prompt made of trusted and untrusted stretches, in order.

        Where the only control tokens are the template's own, each in its place, they are those of
        the whole text in one go. Otherwise the prompt is cut at the template's control tokens, and
        what stands between them is encoded as untrusted text.
        """
        text = "".join(piece.text for piece in pieces)
        own: list[Span] = []
        begin = 0
        for piece in pieces:
            if piece.trusted:
                _, found = self._read(piece.text, "text")
                own += [(begin + start, begin + end, id_) for start, end, id_ in found]
            begin += len(piece.text)
        # A dummy prefix behind each control token can't be left out at the beginning only.
        if at != "text" or self._tokenizers["control"] is self._tokenizers["text"]:
            ids, found = self._read(text, at)
            # Comparing ids is not enough: a normalizer may join the template's own token
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
        return next((text[start:end] for start, end, _ in self._read(text, "text")[1]), None)

    def _read(self, text: str, at: At) -> tuple[list[int], list[Span]]:
        """Ids, with the places of control tokens, and of others that are spelled by their names."""
        if (place := _surrogate(text)) is not None:
            raise PromptError(
                f"Character {place} of the text is half of a surrogate pair, which no tokenizer "
                "can read. Decode the text again from its bytes, or remove the character with "
                "text.encode(errors='replace').decode()."
            )
        encoding = self._tokenizers[at].encode(text, add_special_tokens=False)
        ids = encoding.ids
        if self._is_plain(ids):
            return ids, []
        spans = [(*place, id_) for place, id_ in zip(encoding.offsets, ids, strict=True)]
        return ids, [span for span in spans if self._counts(text, span)]

    def _is_plain(self, ids: Sequence[int]) -> bool:
        """Whether no id is a control token's, nor one that a text may spell by its name."""
        return self._forbidden.isdisjoint(ids) and self._spelled.keys().isdisjoint(ids)

    def _counts(self, text: str, span: Span) -> bool:
        start, end, id_ = span
        name, piece = self._spelled.get(id_), text[start:end]
        if name is None:
            return id_ in self._forbidden
        normalizer = self._whole.normalizer
        return len(piece) > 1 and (
            name in piece or (normalizer is not None and name in normalizer.normalize_str(piece))
        )


def _surrogate(text: str) -> int | None:
    """Where the first half of a surrogate pair stands in a text, if one does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _control_tokens(tokenizer: Any, text_tokens: Collection[str]) -> dict[str, int]:
    """Spelling -> id of special and added tokens, without those that are ordinary text."""
    added = {token.content: (id_, token) for id_, token in tokenizer.added_tokens_decoder.items()}
    ids = {content: id_ for content, (id_, _) in added.items()}
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    for content, id_ in special:
        # A special token that the vocabulary lacks has the unknown token's id, or none.
        if id_ is not None and (id_ != tokenizer.unk_token_id or content == tokenizer.unk_token):
            ids.setdefault(str(content), id_)
    if strangers := sorted(set(text_tokens) - ids.keys()):
        raise PromptError(
            f"text_tokens names {strangers}, which are not special or added tokens of this "
            "tokenizer. Leave them out."
        )
    # Runs of spaces that a tokenizer has tokens for are ordinary text.
    spaces = {
        name
        for name, (_, one) in added.items()
        if not one.special and name.replace("▁", " ").isspace()
    }
    text = {ids[name] for name in spaces.union(text_tokens)}
    return {content: id_ for content, id_ in ids.items() if id_ not in text}


def _has_unknown(tokenizer: Any, model: Any) -> bool:
    """Whether characters may come to the unknown token, and it means nothing else."""
    if tokenizer.unk_token is None or tokenizer.unk_token_id is None:
        return False
    if not isinstance(model, models.Unigram) and model.unk_token != tokenizer.unk_token:
        return False  # declared, but no character gives it: byte-level vocabularies
    roles = ("bos_token", "eos_token", "sep_token", "cls_token", "mask_token")
    return all(getattr(tokenizer, role, None) != tokenizer.unk_token for role in roles)


def _without_prefix(tokenizer: Tokenizer) -> tuple[Any, Any, str]:
    """Normalizer and splitter without the dummy prefix, and whether it was put before a text.

    That is "never", "first" (only at the very start), or "always" (behind control tokens too).
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


def _inside(text: str, span: Span) -> list[int]:
    """Where a token is cut in two: behind its first character that is no space, if more follow."""
    start, end, _ = span
    piece = text[start:end].strip() or text[start:end]
    cut = text.index(piece, start) + 1
    return [cut] if len(piece) > 1 else []


def _trimmed(text: str, span: Span) -> Span:
    """A token's place without the white space that it eats."""
    start, end, id_ = span
    piece = text[start:end]
    return end - len(piece.lstrip()), start + len(piece.rstrip()), id_
