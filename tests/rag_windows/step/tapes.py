"""Recordings on the CPU: what a graph of a device does, with its rules made strict.

A tape keeps the operations on tensors that a step made, not the Python around them, and makes them
again on the very same tensors. So what a step read from the host is what it was at the recording,
as in a graph; and reading a tensor from the host is refused, as while a graph is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rag_windows.step.graphs import Run

aten = torch.ops.aten
FROM_HOST = (
    aten._local_scalar_dense.default,
    aten.lift_fresh.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.is_nonzero.default,
)


class Refused(RuntimeError):
    """An operation that no graph can hold."""


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FROM_HOST:
            raise Refused(f"{func} needs the host")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_leaves(made)))
        return made

    def play(self) -> None:
        for func, args, kwargs, held in self.calls:
            if func.is_view:
                continue
            made = tree_leaves(func(*args, **kwargs))
            for old, new in zip(held, made, strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


class Tapes:
    """Stands in for CUDA graphs.

    Attributes:
        recorded: how many recordings were made.
        played: how often one was launched.
        device: of all tensors.
        errors: what a recording that fails raises.
    """

    device = torch.device("cpu")
    errors = (RuntimeError,)

    def __init__(self) -> None:
        self.recorded = 0
        self.played = 0
        self._lock = threading.Lock()
        self._results: list[torch.Tensor] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            yield
            # Graphs share their memory: results last as long as the turn.
            for result in self._results:
                result.fill_(torch.nan)
            self._results.clear()

    def record(self, run: Run) -> Run:
        assert self._lock.locked()
        run()
        tape = Tape()
        with tape:
            results = run()
        self.recorded += 1

        def replay() -> tuple[torch.Tensor, ...]:
            assert self._lock.locked()
            self.played += 1
            with torch.no_grad():
                tape.play()
            self._results.extend(results)
            return results

        return replay
