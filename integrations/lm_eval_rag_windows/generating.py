"""Free answers: the harness's options of generation, and where an answer ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from rag_windows import WindowedLM
from rag_windows.prefill import EncodedContext

_SLACK = 4


@dataclass(frozen=True, slots=True)
class Wish:
    """How an answer is to be generated.

    Attributes:
        tokens: at most so many.
        until: strings before which the answer ends.
        options: for transformers' generate.
    """

    tokens: int
    until: tuple[str, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, asked: Mapping[str, Any], tokens: int, end: str | None) -> Wish:
        """Read the generation arguments of a task, as the harness's own models do.

        Args:
            asked: ``until``, ``max_gen_toks``, ``do_sample``, ``temperature`` and options of
                transformers' generate.
            tokens: the number of tokens unless ``asked`` says it.
            end: text of the end token, which always ends an answer.
        """
        options = dict(normalize_gen_kwargs(dict(asked), tokens))
        until = handle_stop_sequences(options.pop("until", None), eos=end)
        count = int(options.pop("max_gen_toks"))
        if not options.get("do_sample"):
            options.pop("temperature", None)
        return cls(count, tuple(string for string in until if string), options)


class Until(StoppingCriteria):
    """Stops a row as soon as its generated text holds one of the strings, special tokens included.

    Args:
        tokenizer: of the model.
        strings: not empty.
        prompt_length: tokens before the generated ones.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], prompt_length: int
    ) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._start = prompt_length
        # A token has a byte at least, so a string that ends now began among these.
        self._back = max((len(string.encode()) for string in strings), default=0) + _SLACK

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,)."""
        done = []
        for row in input_ids[:, self._start :].tolist():
            text = str(self._tokenizer.decode(row[-self._back :], skip_special_tokens=False))
            done.append(any(string in text for string in self._strings))
        return torch.tensor(done, device=input_ids.device)


def generate(
    lm: WindowedLM,
    context: EncodedContext,
    question: Sequence[int],
    wish: Wish,
    think_end: str | None,
) -> str:
    """Answer one question.

    Args:
        lm: the model, with a tokenizer.
        context: what the question reads.
        question: token ids.
        wish: how.
        think_end: the answer is what follows this string; None for all of it.
    """
    tokenizer: Any = lm.tokenizer
    criteria = [Until(tokenizer, wish.until, len(context.prefix_ids) + len(question))]
    ids = lm.generate_ids(
        context,
        question,
        max_new_tokens=wish.tokens,
        stopping_criteria=criteria,
        **wish.options,
    )
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    return str(postprocess_generated_text(text, list(wish.until), think_end))
