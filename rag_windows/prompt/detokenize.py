"""From generated tokens back to text, whole and as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes generated ids, special tokens left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # A special token is left out, so bytes on both sides of it are one run.
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        self._open = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(bytes_)}

    def text(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """The text of ``ids``, cut before the first stop string in it."""
        text = self._decode(ids)
        ends = [text.find(string) for string in stop]
        return text[: min((end for end in ends if end >= 0), default=len(text))]

    def find_stop(self, ids: Sequence[int], stop: Sequence[str]) -> str | None:
        """The stop string that the text of ``ids`` holds, if any."""
        text = self._decode(ids)
        return next((string for string in stop if string in text), None)

    def settled(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """The part of the text that no later token can change.

        Left out: an unfinished UTF-8 sequence, an open run of byte tokens (a later invalid byte
        would change all of it), and an end that could become a stop string.
        """
        keep = len(ids)
        while keep and ids[keep - 1] in self._open:
            keep -= 1
        text = self.text(ids[:keep], stop)
        if len(text) < len(self._decode(ids[:keep])):
            return text
        # However many bytes of a character are there, they decode to one replacement character.
        text = text.removesuffix(_REPLACEMENT)
        held = max((_overlap(text, string) for string in stop), default=0)
        return text[: len(text) - held]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that begins ``string``."""
    sizes = range(min(len(text), len(string) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(string[:size])), 0)


class Pieces(BaseStreamer):
    """Turns tokens into pieces of settled text; `sent` is the text put so far."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], put: Callable[[str], None]
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._put = put
        self._ids: list[int] = []
        self._prompt_passed = False
        self.sent = ""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (ignored), then each new token."""
        if not self._prompt_passed:
            self._prompt_passed = True
            return
        self._ids.extend(int(token) for token in value.flatten().tolist())
        settled = self._detokenizer.settled(self._ids, self._stop)
        if len(settled) > len(self.sent) and settled.startswith(self.sent):
            self._put(settled[len(self.sent) :])
            self.sent = settled

    def end(self) -> None:
        """Nothing: the rest comes with the whole result."""
