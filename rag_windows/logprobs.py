"""Log-probabilities of an answer's tokens, noted while they are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor

from rag_windows.errors import GenerationError, InputError

MOST = 20
"""Further tokens that may be asked for at each place."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer.

    Attributes:
        id: of the token.
        logprob: natural logarithm of its probability, by the model's own distribution: before
            temperature, top-p and a form that the answer has to have.
        top: the likeliest tokens in its place, as (id, logprob), the likeliest first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogprobRecorder(LogitsProcessor):
    """Notes the distribution of each token of one answer.

    Args:
        top: how many of the likeliest tokens to note in each place.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._first: int | None = None
        self._noted: dict[int, TokenLogprob] = {}
        self._newest: tuple[int, torch.Tensor] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note; the scores stay as they are."""
        if len(scores) != 1:
            raise GenerationError(
                "logprobs are those of one sequence; leave num_beams and num_return_sequences out."
            )
        length = input_ids.shape[1]
        if self._first is None or length <= self._first:
            self._first, self._noted = length, {}
        elif self._newest is not None:
            place, row = self._newest
            self._noted[place] = self._note(int(input_ids[0, place]), row)
        self._newest = length, scores[0].float().log_softmax(-1)
        return scores

    def tokens(self, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """What was noted of an answer with these tokens."""
        if self._first is None or not ids:
            return ()
        noted = dict(self._noted)
        if self._newest is not None and self._newest[0] == self._first + len(ids) - 1:
            place, row = self._newest
            noted[place] = self._note(ids[-1], row)
        return tuple(noted[self._first + place] for place in range(len(ids)))

    def _note(self, token: int, row: torch.Tensor) -> TokenLogprob:
        best = row.topk(self._top)
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprob(token, float(row[token]), tuple(top))


def recorder_of(options: dict[str, Any]) -> LogprobRecorder | None:
    """Take ``logprobs`` and ``top_logprobs`` out of the options of ``generate``.

    Returns:
        What notes them, which then stands first among the options' logits processors; or None.

    Raises:
        InputError: they can't be had with the other options.
    """
    wanted, top = options.pop("logprobs", None), options.pop("top_logprobs", None)
    if not isinstance(wanted, bool | None):
        raise InputError(
            f"logprobs must be True or False, got {wanted!r}; top_logprobs is a number of tokens."
        )
    if top is not None and (not isinstance(top, int) or not 0 <= top <= MOST):
        raise InputError(f"top_logprobs must be a whole number from 0 to {MOST}, got {top!r}.")
    if not wanted:
        if top:
            raise InputError("top_logprobs needs logprobs=True.")
        return None
    _refuse_drafts(options)
    recorder = LogprobRecorder(top or 0)
    options["logits_processor"] = [recorder, *(options.get("logits_processor") or [])]
    return recorder


def _refuse_drafts(options: Mapping[str, Any]) -> None:
    for name in ("assistant_model", "prompt_lookup_num_tokens"):
        if options.get(name) is not None:
            raise InputError(
                f"logprobs can't be noted with {name}, which checks drafts of several tokens at "
                "once; leave one of them out."
            )
