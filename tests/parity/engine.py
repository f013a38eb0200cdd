"""The engine as these tests use it: the public token-level interface and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rag_windows import APE, PCW, Method, WindowedLM
from rag_windows.integration import EncodedContext

from . import zoo
from .cases import Case
from .dense import Rule


def wrap(model: PreTrainedModel) -> WindowedLM:
    """The engine on a loaded model, at token level."""
    return WindowedLM.from_pretrained(model, tokenizer=None, method=PCW())


@functools.cache
def shared(name: str) -> WindowedLM:
    """The engine on the shared model `name`."""
    return wrap(zoo.shared(name))


def method(rule: Rule) -> Method:
    """The engine's method for a rule of the reference."""
    if rule == Rule():
        return PCW()
    return APE(temperature=rule.temperature, scale=rule.scale, form=rule.form)


def encoded(
    name: str,
    one: Case,
    by: Method | str,
    *,
    scores: Sequence[float] = (),
    before: Sequence[Sequence[int]] = (),
) -> EncodedContext:
    """A case as the shared model `name` reads it."""
    return shared(name).encode_ids(
        one.prefix, one.windows, method=by, scores=scores[: len(one.windows)], before=before
    )


def logits(name: str, one: Case, by: Method | str) -> Tensor:
    """(len(query), vocab) fp32 logits of a case, by the shared model `name`."""
    return shared(name).logits(encoded(name, one, by), one.query)


def rows(lm: WindowedLM, one: Case, rule: Rule) -> Tensor:
    """(len(query), vocab) fp32 logits of a case, by any model."""
    context = lm.encode_ids(one.prefix, one.windows, method=method(rule))
    return lm.logits(context, one.query)


def steps(name: str, one: Case, by: Method, forced: list[int]) -> Tensor:
    """(len(forced), vocab) fp32 logits of decoded steps, each of which takes a forced token."""
    lm = shared(name)
    tokens, found = decode(lm, encoded(name, one, by), one.query, len(forced), forced)
    assert tokens == forced
    return found


class Recorder(LogitsProcessor):
    """Keeps the scores of each decoded step, and may pick the token that comes next.

    Args:
        forced: the tokens to decode instead of the most likely ones.
    """

    def __init__(self, forced: list[int] | None = None) -> None:
        self.steps: list[Tensor] = []
        self._forced = forced

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append(scores[0].clone())
        if self._forced is None:
            return scores
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self._forced[len(self.steps) - 1]] = 0.0
        return chosen


def decode(
    lm: WindowedLM, context: Any, query: list[int], count: int, forced: list[int] | None = None
) -> tuple[list[int], Tensor]:
    """Decode `count` tokens greedily (or the forced ones); the tokens and (count, vocab) logits."""
    recorder = Recorder(forced)
    tokens = lm.generate_ids(
        context,
        query,
        max_new_tokens=count,
        do_sample=False,
        logits_processor=LogitsProcessorList([recorder]),
    )
    return tokens, torch.stack(recorder.steps).float()
