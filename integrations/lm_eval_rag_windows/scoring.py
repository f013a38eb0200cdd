"""Requests that read the same examples are read together: continuations scored, answers written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.models.utils_hf import stop_sequences_criteria

from lm_eval_rag_windows.prompts import Cut, Ids
from rag_windows import WindowedLM
from rag_windows.integration import EncodedContext, Likelihood, likelihoods


@dataclass(slots=True)
class Counts:
    """Counts over all requests so far; those without any prompt, as for perplexity, are left out.

    Attributes:
        windows: how many requests had so many windows.
        contexts: different sets of prefix and windows.
        encoded: windows that were computed.
        reused: windows that were found in the passage cache.
    """

    windows: Counter[int] = field(default_factory=Counter)
    contexts: int = 0
    encoded: int = 0
    reused: int = 0

    def add(self, context: EncodedContext, windows: int, requests: int) -> None:
        """Requests that read one context together."""
        self.windows[windows] += requests
        self.contexts += 1
        self.encoded += context.encoded_windows
        self.reused += context.cached_windows

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "requests_by_windows": {str(n): count for n, count in sorted(self.windows.items())},
            "contexts": self.contexts,
            "windows_encoded": self.encoded,
            "windows_reused": self.reused,
        }


def score(
    lm: WindowedLM,
    asked: Sequence[tuple[Cut, Ids]],
    told: Callable[[int, Likelihood], None],
    counts: Counts | None = None,
) -> list[Likelihood]:
    """Likelihoods of continuations.

    Args:
        lm: the model.
        asked: prompts, and the ids that follow them.
        told: called with the index and result of each as soon as it is there.
        counts: where they are counted.
    """
    found: dict[int, Likelihood] = {}
    for context, group in _together(lm, [cut for cut, _ in asked], counts):
        pairs = [(asked[i][0].question, asked[i][1]) for i in group]
        for index, result in zip(group, likelihoods(lm, context, pairs), strict=True):
            found[index] = result
            told(index, result)
    return [found[index] for index in range(len(asked))]


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


def answer(
    lm: WindowedLM,
    asked: Sequence[tuple[Cut, Wish]],
    told: Callable[[int, str], None],
    counts: Counts,
    think_end: str | None,
) -> list[str]:
    """Free answers, one after the other.

    Args:
        lm: the model, with a tokenizer.
        asked: prompts, and how they are to be answered.
        told: called with the index and text of each as soon as it is there.
        counts: where they are counted.
        think_end: an answer is what follows this string; None for all of it.
    """
    tokenizer: Any = lm.tokenizer
    found: dict[int, str] = {}
    for context, group in _together(lm, [cut for cut, _ in asked], counts):
        for index in group:
            cut, wish = asked[index]
            begins = len(context.prefix_ids) + len(cut.question)
            ids = lm.generate_ids(
                context,
                cut.question,
                max_new_tokens=wish.tokens,
                stopping_criteria=stop_sequences_criteria(tokenizer, list(wish.until), begins, 1),
                **wish.options,
            )
            text = tokenizer.decode(ids, skip_special_tokens=True)
            found[index] = str(postprocess_generated_text(text, list(wish.until), think_end))
            told(index, found[index])
    return [found[index] for index in range(len(asked))]


def _together(
    lm: WindowedLM, cuts: Sequence[Cut], counts: Counts | None
) -> Iterator[tuple[EncodedContext, list[int]]]:
    """Each different set of prefix and windows, encoded, with the requests that read it.

    They come sorted, so that sets which begin alike follow each other while their windows are still
    in the cache.
    """
    groups: dict[tuple[Ids, tuple[Ids, ...]], list[int]] = {}
    for index, cut in enumerate(cuts):
        groups.setdefault((cut.prefix, cut.windows), []).append(index)
    for prefix, windows in sorted(groups):
        group = groups[prefix, windows]
        context = lm.encode_ids(prefix, windows)
        if counts is not None:
            counts.add(context, len(windows), len(group))
        yield context, group
