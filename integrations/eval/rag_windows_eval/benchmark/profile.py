"""Where the time of one decode step goes, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from rag_windows.attention import ATTENTION, NATIVE_LINEAR
from rag_windows_eval.benchmark.answers import Clock
from rag_windows_eval.benchmark.result import table

_STEP, _ATTENTION, _CACHE = "a decode step", "attention", "copying of the KV cache"
_LINEAR = "aten::linear", NATIVE_LINEAR
_OPERATORS = 15


class ProfiledStep(Clock):
    """Profiles the step between the last two tokens of an answer of `TOKENS`."""

    TOKENS = 5

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if model.device.type == "cuda" else []
        self._profiler = profile(activities=kinds)
        self._device = "device" if model.device.type == "cuda" else "cpu"
        self._names = (ATTENTION, str(model.config._attn_implementation))
        self._scope = ExitStack()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called after every token."""
        done = super().__call__(input_ids, scores, **kwargs)
        if len(self.stamps) == self.TOKENS - 1:
            self._scope.enter_context(_named_attention(self._names))
            self._scope.enter_context(self._profiler)
            self._scope.enter_context(record_function(_STEP))
        elif len(self.stamps) == self.TOKENS:
            self._scope.close()
        return done

    def markdown(self) -> str:
        """Shares of the step, and the operators that took the most time themselves."""
        found = self._profiler.key_averages()
        total = {one.key: getattr(one, f"{self._device}_time_total") for one in found}
        whole = total[_STEP]
        shares = {
            "attention": total.get(_ATTENTION, 0),
            "linear layers": sum(total.get(name, 0) for name in _LINEAR),
            _CACHE: total.get(_CACHE, 0),
        }
        shares["the rest"] = whole - sum(shares.values())
        rows = [[name, f"{us / 1000:.2f} ms", f"{us / whole:.1%}"] for name, us in shares.items()]
        operators = found.table(
            sort_by=f"self_{self._device}_time_total",
            row_limit=_OPERATORS,
            max_name_column_width=40,
        )
        indented = [f"    {line}".rstrip() for line in operators.splitlines()]
        return "\n".join([*table(["part", "time", "share"], rows), "", *indented])


@contextmanager
def _named_attention(names: tuple[str, ...]) -> Iterator[None]:
    """Name the attention of these implementations and the KV cache's copying in a profile."""

    def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                return function(*args, **kwargs)

        return call

    known = AttentionInterface()
    before, update = {name: known[name] for name in names if name in known}, Cache.update
    for name, function in before.items():
        AttentionInterface.register(name, named(_ATTENTION, function))
    Cache.update = named(_CACHE, update)
    try:
        yield
    finally:
        Cache.update = update
        for name, function in before.items():
            AttentionInterface.register(name, function)
