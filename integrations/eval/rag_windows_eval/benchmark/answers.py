"""Functions that answer a question, by the names of `VARIANTS`, and the clock that times them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria

from rag_windows import PassageCache
from rag_windows.errors import InputError
from rag_windows.model import WindowedLM
from rag_windows_eval.benchmark.result import (
    COLD,
    DISK,
    INT8,
    MEMORY,
    SEQUENTIAL,
    UNCITED,
    VARIANTS,
    BenchPlan,
)
from rag_windows_eval.benchmark.workload import PREFIX_TOKENS, Workload, token_bytes

_BUDGET_RATIO = 1.25
"""Bytes of the timed tier divided by those of its windows: some of them stay free."""


def now() -> float:
    """The time in seconds, once the accelerator has finished its work, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    begun = now()
    work()
    return now() - begun


class Clock(StoppingCriteria):
    """A stopping criterion that stops nothing and records when each token of an answer is there.

    `stamps` are seconds from the start to each token; for `prefill_s` and `end_s`, see `Row`.
    """

    def __init__(self) -> None:
        self.begun = self.prefill_s = self.end_s = 0.0
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by transformers after every token."""
        self.stamps.append(now() - self.begun)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the answer that is made meanwhile."""
        self.begun = now()
        yield
        self.end_s = now() - self.begun

    @property
    def decode_s(self) -> float:
        """Seconds of a decode step: the mean over the tokens behind the first."""
        return (self.stamps[-1] - self.stamps[0]) / (len(self.stamps) - 1)


Answer = Callable[[Workload, int, Clock], None]
"""Answers with so many tokens, and records when they came."""


def greedy(tokens: int, *criteria: Any) -> dict[str, Any]:
    """Options of transformers' generate: exactly so many tokens."""
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    return {**length, "stopping_criteria": [*criteria]}


def plain(model: PreTrainedModel) -> Answer:
    """Everything as one prompt through ``generate``: what most users run."""

    def answer(asked: Workload, tokens: int, clock: Clock) -> None:
        prompt = torch.tensor([asked.prompt], device=model.device)
        with clock.running():
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy(tokens, clock))
        clock.prefill_s = clock.stamps[0]

    return answer


def windowed(lm: WindowedLM, *, citations: bool = True, method: str | None = None) -> Answer:
    """Text through `WindowedLM.generate`."""

    def answer(asked: Workload, tokens: int, clock: Clock) -> None:
        with clock.running():
            made = lm.generate(
                asked.question,
                asked.passages,
                prefix=asked.system,
                method=method,
                citations=citations,
                **greedy(tokens, clock),
            )
        clock.prefill_s = made.timings.encode_s

    return answer


def cold(lm: WindowedLM, cache: PassageCache) -> Answer:
    """Answers with an empty cache, like the first question of all."""
    answered = windowed(lm.with_cache(cache))

    def answer(asked: Workload, tokens: int, clock: Clock) -> None:
        cache.flush()
        cache.clear()
        answered(asked, tokens, clock)

    return answer


def from_disk(lm: WindowedLM, cache: PassageCache) -> Answer:
    """The first question of a process over passages that an earlier one has read."""
    answered = windowed(lm.with_cache(cache))

    def answer(asked: Workload, tokens: int, clock: Clock) -> None:
        cache.flush()
        if cache.memory is not None:
            cache.memory.clear()
        answered(asked, tokens, clock)

    return answer


@contextmanager
def all_answers(lm: WindowedLM, plan: BenchPlan) -> Iterator[dict[str, Answer]]:
    """All answers that are planned, by name, in their order.

    Caches are those of the command line, each with a folder of its own; an accelerator stores the
    windows from memory in its own memory.

    Raises:
        InputError: at the end, if a cache had to evict windows.
    """
    with ExitStack() as stack:
        budget = _budget(plan, lm)
        opened = {
            COLD: new_cache(),
            DISK: new_cache("disk", disk=budget),
            MEMORY: warm_cache(plan, lm),
        }
        if INT8 in (plan.way or ()):
            opened[INT8] = warm_cache(plan, lm, store="int8")
        caches = {name: stack.enter_context(one) for name, one in opened.items()}
        warm = lm.with_cache(caches[MEMORY])
        answers = {
            SEQUENTIAL: plain(lm.model),
            COLD: cold(lm, caches[COLD]),
            DISK: from_disk(lm, caches[DISK]),
            MEMORY: windowed(warm),
            MEMORY + UNCITED: windowed(warm, citations=False),
        }
        chosen = {name: answers[name] for name in VARIANTS if name in (plan.way or VARIANTS)}
        if INT8 in caches:
            chosen[INT8] = windowed(lm.with_cache(caches[INT8]))
        others = {f"{MEMORY}, {name}": windowed(warm, method=name) for name in plan.against or ()}
        yield chosen | others


def warm_cache(
    plan: BenchPlan, lm: WindowedLM, store: str = "as computed"
) -> AbstractContextManager[PassageCache]:
    """A cache whose fastest tier holds all of a plan's windows; see `new_cache`."""
    if plan.device == "cpu":
        return new_cache(store=store)
    return new_cache("device", device_bytes=_budget(plan, lm), store=store)


def _budget(plan: BenchPlan, lm: WindowedLM) -> int:
    """Bytes for all windows of a plan; each of several questions has half of its own."""
    passages = plan.context * (1 + (plan.questions or 1)) // 2
    size = (passages + PREFIX_TOKENS) * token_bytes(lm.model)
    size += (passages // plan.window + 1) * lm.engine.state_bytes
    return int(_BUDGET_RATIO * size)


@contextmanager
def new_cache(tier: str = "memory", **options: Any) -> Iterator[PassageCache]:
    """A cache as on the command line except for options, in a temporary folder of its own.

    Raises:
        InputError: at the end, if the tier that is timed did not hold all windows.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rag-windows-bench-") as folder,
        PassageCache.default(folder, **options) as cache,
    ):
        yield cache
        cache.flush()
        held = cache.stats().tiers.get(tier)
        if held is not None and (held.evictions or held.refused or held.failed):
            raise InputError(
                f"The cache's tier {tier!r} could not hold the windows of this context in "
                f"{held.limit_bytes:,} bytes (of host memory, a quarter of what is free). Use a "
                "smaller --context or fewer --questions."
            )
