"""Small models whose steps are recorded on tapes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

from rag_windows import PCW, WindowedLM
from rag_windows.step.steps import Steps
from tests.parity import zoo
from tests.rag_windows import small

from .tapes import Tapes

PREFIX, WINDOWS, QUERY = [0, 4], [[80, 81, 82, 83], [90, 91]], [99, 65, 5]
OTHER = [[70, 71, 72], [60, 61, 62, 63, 64]]
NAMES = ("llama", "llama-mha", "qwen3", "gpt2", "gemma2", "gemma3_text-sliding", "mistral-sliding")


class Kept(LogitsProcessor):
    """Keeps the logits of each step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(scores[0].clone())
        return scores


def ordinary(name: str) -> WindowedLM:
    """A model of the zoo as it runs on the CPU."""
    return WindowedLM.from_pretrained(zoo.shared(name), tokenizer=None, method=PCW())


def recorded(name: str, tapes: Any = None, **options: int) -> tuple[WindowedLM, Any]:
    """The same, with steps that are recorded soon; and what records them."""
    return _recording(ordinary(name), tapes, options)


def recorded_small(tapes: Any = None, **options: int) -> tuple[WindowedLM, Any]:
    """`small.lm()`, likewise."""
    lm = WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer())
    return _recording(lm, tapes, options)


def _recording(lm: WindowedLM, tapes: Any, options: dict[str, int]) -> tuple[WindowedLM, Any]:
    tapes = Tapes() if tapes is None else tapes
    settings = {"eager_steps": 1, "pays_from": 2, **options}
    lm._decoder.steps = Steps(lm._decoder.runner.model, tapes, **settings)
    return lm, tapes


def steps(lm: WindowedLM) -> Any:
    """What lends recordings to this model's calls."""
    return lm._decoder.steps


def decode(
    lm: WindowedLM, context: Any, query: list[int], count: int, **options: Any
) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the logits (count, vocabulary) of which they were chosen."""
    kept = Kept()
    ids = lm.generate_ids(context, query, max_new_tokens=count, logits_processor=[kept], **options)
    return ids, torch.stack(kept.steps)


def ids(lm: WindowedLM, count: int, windows: list[list[int]] = WINDOWS, **options: Any) -> Any:
    """Exactly ``count`` tokens behind the prefix and these windows."""
    return answer(lm, lm.encode_ids(PREFIX, windows), count, **options)


def answer(
    lm: WindowedLM, context: Any, count: int, query: list[int] = QUERY, **options: Any
) -> Any:
    """Exactly ``count`` tokens behind a context."""
    return lm.generate_ids(context, query, max_new_tokens=count, min_new_tokens=count, **options)


def expected(count: int, windows: list[list[int]] = WINDOWS) -> Any:
    """What ordinary steps give."""
    return ids(small.lm(), count, windows)
