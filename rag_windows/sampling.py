"""Sampling: the options that ask for it, and seeds that other threads can't disturb."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class SeededSampling(TorchFunctionMode):
    """Draws every token of one call from a generator of its own.

    transformers samples from PyTorch's global generator, which all threads share. This mode, which
    PyTorch keeps per thread, hands a private one to ``torch.multinomial``; the numbers are those
    that ``torch.manual_seed(seed)`` would give a process with a single thread.

    Args:
        seed: of the private generator.
        device: where the probabilities are.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass every call on; give ``torch.multinomial`` our generator."""
        kwargs = dict(kwargs or {})
        if func is torch.multinomial:
            kwargs.setdefault("generator", self._generator)
        return func(*args, **kwargs)


def seeded(seed: int | None, device: torch.device) -> AbstractContextManager[Any]:
    """The mode for ``seed``, or nothing for None (the global generator, as in transformers)."""
    return nullcontext() if seed is None else SeededSampling(seed, device)


def sampling_options(temperature: float | None, top_p: float | None = None) -> dict[str, Any]:
    """Options of ``generate``: temperature 0 is greedy, more samples, None leaves it to the model.

    Args:
        temperature: of the next token's distribution, at least 0.
        top_p: nucleus sampling, in (0, 1].
    """
    if temperature == 0:
        return {"do_sample": False}
    chosen = {"temperature": temperature, "top_p": top_p}
    options = {name: value for name, value in chosen.items() if value is not None}
    return {"do_sample": True, **options} if options else {}
