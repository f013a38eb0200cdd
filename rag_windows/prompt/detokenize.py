"""From generated tokens back to text, whole and as it comes."""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self

import torch
from transformers import CodeGenTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation.streamers import BaseStreamer

_REPLACEMENT = "\ufffd"

_CONTEXT = 4
"""Tokens that are decoded again with each new one.

UTF-8 knows after three bytes where a character begins, whatever stood before them, and every token
has a byte at least. Other decoders only look whether a token is the first.
"""

_BOUNDED = re.compile(
    r"WordPiece |BPEDecoder |"
    r"((Replace|Metaspace|Strip) )*(?P<joint>(ByteFallback )?Fuse |ByteLevel )?(?P<strip>Strip )?"
)
"""Decoders, in order, for which that context is enough.

They change each token by itself, then put bytes together, then take a space off the start.
"""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Decodes generated ids, special tokens left out but for those ``shown``.

    Attributes:
        bounded: whether a token's text depends on no more than the few tokens before it, but for
            runs of byte tokens. False of rare decoders, which `TextStream` has decode all tokens
            of an answer for each new one.
        splits: whether a token may end within a character.
        strips: whether a space at the start of the text is left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        backend = self._backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        self._special = {id_ for id_, token in added.items() if token.special} - {*shown}
        self._shown = bool(shown)
        stages = _stages(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        shape = _BOUNDED.fullmatch("".join(f"{stage['type']} " for stage in stages))
        last = stages[-1] if shape and shape["joint"] and shape["strip"] else None
        plain = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        self.bounded = (
            shape is not None
            and last in (None, plain)
            # Some classes change the text once more.
            and type(tokenizer).decode in (PreTrainedTokenizerBase.decode, CodeGenTokenizer.decode)
            and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        )
        names = {stage["type"] for stage in stages}
        self.splits = not self.bounded or "ByteLevel" in names
        self.strips = last is not None
        self._byte_tokens = "ByteFallback" in names
        self._bytes_of = (
            {character: byte for byte, character in bytes_to_unicode().items()}
            if "ByteLevel" in names
            else {}
        )

    def text(self, ids: Sequence[int]) -> str:
        """The text of all ids."""
        given = [id_ for id_ in ids if id_ not in self._special] if self._shown else list(ids)
        return str(
            self._tokenizer.decode(
                given,
                skip_special_tokens=not self._shown,
                clean_up_tokenization_spaces=False,
            )
        )

    def token_bytes(self, id_: int) -> bytes:
        """What an id adds to a text that has begun; all of an answer's joined are its text.

        A token may hold a part of a character. A special token adds nothing.
        """
        token = self.token(id_)
        if token is None:
            return b""
        if isinstance(token, int):
            return bytes([token])
        if self._bytes_of:
            try:
                return bytes(self._bytes_of[character] for character in token)
            except KeyError:  # an added token, which stands for itself
                return token.encode()
        # A decoder may take the first token for the beginning of a text.
        single, both = self.text([id_]), self.text([id_, id_])
        return (both[len(single) :] if both.startswith(single) else single).encode()

    def spans(self, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
        """Where in their ``text`` each id's part begins and ends.

        The part of an id that ends within a character lacks that character; the next one has it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts = [decoder.decode(self.token_bytes(id_)) for id_ in ids]
        whole = "".join(parts) + decoder.decode(b"", final=True)
        if whole.endswith(text):
            start = len(text) - len(whole)  # a space that the text leaves out
        else:
            stream, start = TextStream(self), 0
            parts = [stream.feed([id_]) for id_ in ids]
        ends = [max(0, end) for end in accumulate(map(len, parts), initial=start)]
        return list(pairwise(ends))

    def token(self, id_: int) -> str | int | None:
        """What a decoder sees of an id: the byte that it stands for, or its spelling.

        None for special tokens and ids without a token, which are left out before anything is
        decoded.
        """
        spelled: str | None = None if id_ in self._special else self._backend.id_to_token(id_)
        if spelled is not None and self._byte_tokens and (byte := _BYTE.fullmatch(spelled)):
            return int(byte[1], 16)
        return spelled


def _stages(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The decoders that a decoder consists of, in order."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for one in decoder["decoders"] for stage in _stages(one)]


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    ends = [text.find(string) for string in stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


class _ByteRun:
    """Byte tokens in a row: text if all of them together are UTF-8, else a replacement for each.

    Attributes:
        count: of the bytes.
        characters: those that are complete.
        begun: the bytes of one that is not.
        broken: whether nothing that follows can make it UTF-8.
    """

    def __init__(self, *, strip: bool) -> None:
        """``strip`` leaves a space out that begins the text."""
        self.count = 0
        self.characters: list[str] = []
        self.begun = b""
        self.broken = False
        self._strip = strip

    def add(self, byte: int) -> None:
        """Take a byte of a run that is not broken."""
        self.count += 1
        self.begun += bytes([byte])
        try:
            character = self.begun.decode()
        except UnicodeDecodeError as error:
            self.broken = error.reason != "unexpected end of data"
            return
        if not (self._strip and character == " "):
            self.characters.append(character)
        self.begun, self._strip = b"", False

    def text(self) -> str:
        """The text if no byte follows."""
        if self.broken or self.begun:
            return _REPLACEMENT * self.count
        return "".join(self.characters)

    def fork(self) -> _ByteRun:
        """A copy that continues independently."""
        other = copy.copy(self)
        other.characters = [*self.characters]
        return other


class AnswerDivider(Protocol):
    """What divides the text of an answer into reasoning and what is for the user.

    Attributes:
        answering: whether the reasoning is over, or there is none.
    """

    answering: bool

    def feed(self, written: str) -> tuple[str, str]:
        """Take a piece; gives what of it is reasoning, and text."""

    def fork(self) -> Self:
        """A copy that continues independently."""


class TextStream:
    """The text of an answer whose tokens come one after the other.

    Each token is decoded a few times, however long the answer is. It is not
    `tokenizers.decoders.DecodeStream`: there a byte token that makes those before it invalid raises
    an error or changes text that was given out, each token of a run of invalid bytes has all of the
    run decoded, and the text that is not settled yet, which may hold a stop string, is never given.

    Stop strings are looked for only in what is for the user.

    Attributes:
        stopped: whether the text of the tokens so far holds a stop string.
        reasoning: what of the tokens fed last was reasoning, where there are ``parts``.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), parts: AnswerDivider | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._parts = parts
        self.reasoning = ""
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self.stopped = self._cut = False
        # The end of the settled text, into which a stop string may reach back. So many of its
        # characters begin one, and were not given out yet.
        self._back, self._held = "", 0
        # The newest tokens that have text, their settled text, and what may still change.
        self._window: tuple[int, ...] = ()
        self._known = self._open = ""
        # The open run of byte tokens, and whether its text holds a stop string.
        self._run: _ByteRun | None = None
        self._stop_in_run = False

    def fork(self) -> TextStream:
        """A copy that continues independently."""
        other = copy.copy(self)
        if self._run is not None:
            other._run = self._run.fork()
        if self._parts is not None:
            other._parts = self._parts.fork()
        return other

    def feed(self, ids: Sequence[int]) -> str:
        """Take further tokens; returns what of the text is settled with them.

        Settled is what no later token can change. That leaves out an unfinished UTF-8 sequence, an
        open run of byte tokens (a later invalid byte would change all of it), and an end that could
        become a stop string. From the token on with which there is a stop string nothing comes.
        """
        self.reasoning = ""
        text = "".join([self._take(id_) for id_ in ids])
        self.stopped = self._cut or (bool(self._stop) and self._stops_openly())
        return text

    def _take(self, id_: int) -> str:
        """`feed` for one token."""
        if self._cut or not (settled := self._settle(id_)):
            return ""
        if self._parts is not None:
            reasoning, settled = self._parts.feed(settled)
            self.reasoning += reasoning
        if not self._stop or not settled:
            return settled
        text = self._back + settled
        start = len(self._back) - self._held
        if any(string in text for string in self._stop):
            self._cut = True
            return ""
        self._held = max(_overlap(text, string) for string in self._stop)
        self._back = text[max(0, len(text) - self._longest + 1) :]
        return text[start : len(text) - self._held]

    def _stops_openly(self) -> bool:
        """Whether a stop string ends in text that is not settled."""
        if self._parts is not None and not self._parts.answering:
            return False
        run, text = self._run, self._open
        if run is not None:
            if run.broken or not run.begun:
                return self._stop_in_run
            text = _REPLACEMENT * min(run.count, self._longest)
        return any(string in self._back + text for string in self._stop)

    def _settle(self, id_: int) -> str:
        """Take a token; returns the text that later ones can't change, stop strings or not."""
        detokenizer = self._detokenizer
        token = detokenizer.token(id_)
        if token is None:
            return ""
        if isinstance(token, int) and detokenizer.bounded:
            return self._settle_byte(id_, token)
        ended = self._end_run()
        window = (*self._window, id_)
        text = detokenizer.text(window)
        settled = self._without_end(text)
        if not settled.startswith(self._known) or isinstance(token, int):
            settled = self._known
        new = settled[len(self._known) :]
        self._open = text[len(settled) :] if text.startswith(settled) else text
        if detokenizer.bounded and len(window) > 2 * _CONTEXT:
            shorter = window[-_CONTEXT:]
            # Behind tokens without text, a decoder would take the next one for the first.
            if known := self._without_end(detokenizer.text(shorter)):
                window, settled = shorter, known
        self._window, self._known = window, settled
        return ended + new

    def _settle_byte(self, id_: int, byte: int) -> str:
        """`_settle` for a byte token."""
        run = self._run
        if run is None:
            strip = self._detokenizer.strips and not self._window
            run, self._stop_in_run = _ByteRun(strip=strip), False
            self._run = run
        self._window = (*self._window, id_)[-_CONTEXT:]
        if run.broken:
            return _REPLACEMENT
        run.add(byte)
        if run.broken:
            self._stop_in_run = False
            return run.text()
        if self._stop and not run.begun:
            newest = self._back + "".join(run.characters[-self._longest :])
            self._stop_in_run = self._stop_in_run or newest.endswith(self._stop)
        return ""

    def _end_run(self) -> str:
        """The text of the run of byte tokens that another token ends, if it is not settled yet."""
        run, self._run = self._run, None
        if run is None:
            return ""
        self._known = self._detokenizer.text(self._window)
        return "" if run.broken else run.text()

    def _without_end(self, text: str) -> str:
        """A text without the character that may be unfinished."""
        # However many bytes of a character are there, they decode to one replacement character.
        return text.removesuffix(_REPLACEMENT) if self._detokenizer.splits else text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that begins ``string``, but is not all of it."""
    start = text.find(string[0], max(0, len(text) - len(string) + 1))
    while start >= 0 and not string.startswith(text[start:]):
        start = text.find(string[0], start + 1)
    return len(text) - start if start >= 0 else 0


class Pieces(BaseStreamer):
    """Hands on the text of generated tokens, piece by piece, as it settles.

    With ``parts``, what is reasoning goes to ``put_reasoning``.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        put: Callable[[str], None],
        parts: AnswerDivider | None = None,
        put_reasoning: Callable[[str], None] | None = None,
    ) -> None:
        self._text = TextStream(detokenizer, stop, parts)
        self._put, self._put_reasoning = put, put_reasoning
        self._pieces: list[str] = []
        self._reasoning: list[str] = []
        self._prompt_passed = False

    @property
    def sent(self) -> str:
        """The text put so far."""
        return "".join(self._pieces)

    @property
    def sent_reasoning(self) -> str:
        """The reasoning put so far."""
        return "".join(self._reasoning)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (ignored), then new tokens."""
        if not self._prompt_passed:
            self._prompt_passed = True
            return
        piece = self._text.feed(value.flatten().tolist())
        if self._text.reasoning and self._put_reasoning is not None:
            self._put_reasoning(self._text.reasoning)
            self._reasoning.append(self._text.reasoning)
        if piece:
            self._put(piece)
            self._pieces.append(piece)

    def end(self) -> None:
        """Nothing: the rest comes with the whole result."""
