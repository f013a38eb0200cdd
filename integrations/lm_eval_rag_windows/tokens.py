"""From a prompt with borders to token ids: prefix, windows, question."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rag_windows.prompt.template import BaseLayout
from rag_windows.prompt.tokenizing import Boundary, Piece

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A prompt in token ids: joined in this order, they are those of the prompt in one go.

    Attributes:
        prefix: what all windows see.
        windows: none of them empty.
        question: the rest.
    """

    prefix: Ids
    windows: tuple[Ids, ...]
    question: Ids


class Cutter:
    """Encodes prompts as the harness's own models do, and cuts the ids.

    Args:
        tokenizer: of the model.
        boundary: made of it.
        add_bos_token: whether a prompt begins with the beginning-of-sequence token; None asks the
            tokenizer.
        bos: text of the token which, where a template wrote it, is not put before it once more.
    """

    def __init__(
        self, tokenizer: Any, boundary: Boundary, *, add_bos_token: bool | None, bos: str
    ) -> None:
        self._boundary = boundary
        self._bos = bos
        if add_bos_token is None:
            self._leading = tuple(BaseLayout(tokenizer).leading)
        elif add_bos_token and tokenizer.bos_token_id is not None:
            self._leading = (tokenizer.bos_token_id,)
        else:
            self._leading = ()
        # The same examples come back in many prompts.
        self._part = lru_cache(maxsize=4096)(self._encode)
        # A question's choices ask for the same cut.
        self._cut = lru_cache(maxsize=8)(self._cut_new)

    def leading(self, pieces: Sequence[Piece]) -> Ids:
        """Ids before the text."""
        written = bool(pieces) and pieces[0].trusted and bool(self._bos)
        return () if written and pieces[0].text.startswith(self._bos) else self._leading

    def ids(self, pieces: Sequence[Piece]) -> Ids:
        """A prompt's ids, leading ones included."""
        return (*self.leading(pieces), *self._encode(tuple(pieces), "start"))

    def text(self, text: str) -> Ids:
        """Ids of a text as a prompt, leading ones included."""
        return self.ids([Piece(text)])

    def plain(self, text: str) -> Ids:
        """Ids of a text without anything before it."""
        return self._encode((Piece(text),), "start")

    def cut(self, pieces: Sequence[Piece], ends: Sequence[int]) -> Cut:
        """Cut a prompt.

        Where a token reaches over an end, it goes to the later part as a whole.

        Args:
            pieces: the prompt.
            ends: character offsets: of the prefix, then of each window; ascending.
        """
        return self._cut(tuple(pieces), tuple(ends))

    def _cut_new(self, pieces: tuple[Piece, ...], ends: tuple[int, ...]) -> Cut:
        whole = self.ids(pieces)
        for parts in (self._parts(pieces, ends), self._parts(pieces, ends, ahead=True)):
            if [token for part in parts for token in part] == list(whole):
                break
        else:
            parts = self._out_of(whole, pieces, ends)
        prefix, *windows = parts[:-1]
        question = parts[-1]
        windows = [ids for ids in windows if ids]
        # There has to be a token that something is predicted from.
        if not question and windows:
            question = windows.pop()
        elif not question:
            prefix, question = (), prefix
        return Cut(prefix, tuple(windows), question)

    def _parts(
        self, pieces: Sequence[Piece], ends: Sequence[int], *, ahead: bool = False
    ) -> list[Ids]:
        """Each part for itself; mostly that is what a tokenizer makes of the whole.

        Many tokenizers write two line breaks as one token at the end of a text, and as two before a
        letter. So with ``ahead``, each part is encoded in sight of the next one's first character.
        """
        texts = list(_between(pieces, ends))
        parts: list[Ids] = []
        for number, part in enumerate(texts):
            behind = "text" if number and ends[number - 1] else "start"
            ids = self._part(tuple(part), behind)
            follower = next((piece for later in texts[number + 1 :] for piece in later), None)
            if ahead and part and follower is not None:
                first = (Piece(follower.text[0], follower.trusted),)
                seen, alone = self._part((*part, *first), behind), self._part(first, "text")
                ids = seen[: -len(alone)] if alone and seen[-len(alone) :] == alone else ids
            parts.append((*self.leading(pieces), *ids) if number == 0 else ids)
        return parts

    def _out_of(self, whole: Ids, pieces: Sequence[Piece], ends: Sequence[int]) -> list[Ids]:
        """The whole, cut where the ids of its beginning, or of its rest, agree with it."""
        cuts = [0]
        for end in ends:
            beginning, rest = _between(pieces, [end])
            before = (*self.leading(pieces), *self._encode(tuple(beginning), "start"))
            at = common_length(before, whole)
            if at < len(before):
                behind = self._encode(tuple(rest), "text" if end else "start")
                if behind and whole[-len(behind) :] == behind:
                    at = len(whole) - len(behind)
            cuts.append(max(cuts[-1], at))
        cuts.append(len(whole))
        return [whole[a:b] for a, b in itertools.pairwise(cuts)]

    def _encode(self, pieces: tuple[Piece, ...], at: Any) -> Ids:
        return tuple(self._boundary.encode_pieces(pieces, at))


def _between(pieces: Sequence[Piece], ends: Sequence[int]) -> Iterator[list[Piece]]:
    """The pieces of each part, the last one being what follows all ends."""
    start = 0
    length = sum(len(piece.text) for piece in pieces)
    for end in (*ends, length):
        yield list(clipped(pieces, start, end))
        start = end


def clipped(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Piece]:
    """What of the pieces lies between two character offsets."""
    at = 0
    for piece in pieces:
        text = piece.text[max(0, start - at) : max(0, end - at)]
        at += len(piece.text)
        if text:
            yield Piece(text, piece.trusted)


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How far two sequences agree from their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
