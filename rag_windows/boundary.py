"""Text becomes ids here, and control tokens do not come out of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

from rag_windows.control_tokens import ControlTokens
from rag_windows.errors import PromptError
from rag_windows.fast_text import At, FastText
from rag_windows.forks import cached_property
from rag_windows.python_text import PythonText


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
        found = [self._control_spans(piece.text) if piece.trusted else [] for piece in pieces]
        text = "".join(piece.text for piece in pieces)
        if not text:
            return []
        _check_characters(text)
        reader = self._text
        if isinstance(reader, FastText) and reader.reads_on(at) and not self._touched(pieces):
            ids, places = reader.placed(text, at)
            unknown = self.controls.unknown is not None and self.controls.unknown[1] in ids
            # An unknown token may stand for an unknown character or for its own name: cut, to know.
            if not unknown and self._in_place(ids, places, pieces, found):
                return ids
        ids, stretch = [], ""
        for piece, spans in zip(pieces, found, strict=True):
            position = 0
            for start, end, id_ in spans:
                ids += self.encode(stretch + piece.text[position:start], at)
                ids.append(id_)
                stretch, position, at = "", end, "control"
            stretch += piece.text[position:]
        return ids + self.encode(stretch, at)

    def _control_spans(self, text: str) -> list[tuple[int, int, int]]:
        """(start, end, id) of a template's control tokens, with the spaces that they eat."""
        spans: list[tuple[int, int, int]] = []
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

    def _in_place(
        self,
        ids: Sequence[int],
        places: Sequence[tuple[int, int]],
        pieces: Sequence[Piece],
        found: Sequence[Sequence[tuple[int, int, int]]],
    ) -> bool:
        """Whether the control tokens among ``ids`` are those found in trusted text, in place.

        Their list alone says too little: a normalizer may join the template's own token with the
        first character of a message, and make the same token out of other characters behind it.
        """
        text = "".join(piece.text for piece in pieces)
        begins = accumulate((len(piece.text) for piece in pieces), initial=0)
        wanted = [
            (begin + start, begin + end, id_)
            for begin, spans in zip(begins, found, strict=False)
            for start, end, id_ in spans
        ]
        got = [
            (*place, id_)
            for place, id_ in zip(places, ids, strict=True)
            if id_ in self.controls.ids
        ]
        return len(got) == len(wanted) and all(
            one == other and _same_place(text, (a, b), (c, d))
            for (a, b, one), (c, d, other) in zip(got, wanted, strict=True)
        )

    def _touched(self, pieces: Sequence[Piece]) -> bool:
        """Whether a control token's spelling lies in, or reaches into, untrusted text."""
        text = "".join(piece.text for piece in pieces)
        untrusted = []
        position = 0
        for piece in pieces:
            if not piece.trusted and piece.text:
                untrusted.append((position, position + len(piece.text)))
            position += len(piece.text)
        matches = [(m.start(1), m.end(1)) for m in self._overlapping.finditer(text)]
        return any(
            start < last and first < end for start, end in matches for first, last in untrusted
        )

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
