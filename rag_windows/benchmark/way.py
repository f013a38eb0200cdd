"""The ways to answer that are compared; all read the same tokens with the same weights."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from rag_windows.benchmark.clock import Clock, Timing, synchronize
from rag_windows.benchmark.load import Load
from rag_windows.benchmark.plan import COLD, DISK, MEMORY, PREFIX_KEPT, SEQUENTIAL
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.model import WindowedLM

_ROOM = "64GiB"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to answer.

    Attributes:
        name: as tables show it.
        run: from a prompt and a number of tokens to when they came.
    """

    name: str
    run: Callable[[Load, int], Timing]


def sequential(model: PreTrainedModel) -> Way:
    """Everything as one prompt through ``generate``: what most users run."""

    def run(load: Load, tokens: int) -> Timing:
        prompt = torch.tensor([load.prompt], device=model.device)
        return _generated(model, prompt, tokens, None)

    return Way(SEQUENTIAL, run)


def prefix_kept(model: PreTrainedModel) -> Way:
    """The same with the keys and values of the prefix kept; passages still stand behind it."""
    kept: dict[tuple[int, ...], DynamicCache] = {}

    def run(load: Load, tokens: int) -> Timing:
        if load.prefix not in kept:
            ids = torch.tensor([load.prefix], device=model.device)
            with torch.no_grad():
                kept[load.prefix] = model(ids, use_cache=True).past_key_values
        prompt = torch.tensor([load.prompt], device=model.device)
        return _generated(model, prompt, tokens, copy.deepcopy(kept[load.prefix]))

    return Way(PREFIX_KEPT, run)


def _generated(
    model: PreTrainedModel, prompt: torch.Tensor, tokens: int, past: DynamicCache | None
) -> Timing:
    synchronize()
    clock = Clock()
    options: dict[str, Any] = {} if past is None else {"past_key_values": past}
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=[clock],
        **options,
    )
    return Timing(None, tuple(clock.stamps))


def windows(lm: WindowedLM, name: str) -> Way:
    """Windows by a model with the cache that it has."""

    def run(load: Load, tokens: int) -> Timing:
        synchronize()
        clock = Clock()
        context = lm.encode_ids(load.prefix, load.windows)
        synchronize()
        encoded = time.perf_counter() - clock.begun
        lm.generate_ids(
            context,
            load.query,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            stopping_criteria=[clock],
        )
        return Timing(encoded, tuple(clock.stamps))

    return Way(name, run)


@contextmanager
def all_ways(lm: WindowedLM, *, device: bool) -> Iterator[tuple[Way, ...]]:
    """Every way, and a folder for the disk's that is gone afterwards.

    Args:
        lm: without a cache.
        device: whether the warm windows are kept on the accelerator, too.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rag-windows-bench-")))
        memory = PassageCache(_ROOM, device=_ROOM) if device else PassageCache(_ROOM)
        stack.callback(memory.close)
        disk = PassageCache(None, disk=_ROOM, path=folder / "windows")
        stack.callback(disk.close)
        yield (
            sequential(lm.model),
            prefix_kept(lm.model),
            windows(lm, COLD),
            windows(lm.with_cache(memory), MEMORY),
            windows(lm.with_cache(disk), DISK),
        )
