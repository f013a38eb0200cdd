"""Recording a step once and launching it again: CUDA graphs, or what stands in for them.

transformers' own way to a cheaper step, a compilable cache and `torch.compile`, does not fit:
the hook's context variable breaks the compiled graph in every layer (tried with torch 2.13).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from rag_windows.attention.kernels.loading import kernels

Run = Callable[[], tuple[torch.Tensor, ...]]
"""Does a step's work on tensors at fixed addresses, and gives its results."""


class Graphs(Protocol):
    """Records work on one device."""

    @property
    def device(self) -> torch.device:
        """Where the work is done."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What a recording that fails raises."""

    def turn(self) -> AbstractContextManager[None]:
        """While no other thread records or replays: what graphs need in between, they share."""

    def record(self, run: Run) -> Run:
        """Record the work of ``run``, which may be run more than once; in one's turn.

        Returns:
            What does the same work again, and gives the very same tensors with new contents. They
            hold them until the turn ends.
        """


class CudaGraphs:
    """CUDA graphs of one model, which share a pool of memory.

    Args:
        device: of the whole model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self._device

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What a recording that fails raises; torch's own derive from RuntimeError."""
        loaded = kernels()
        return (RuntimeError,) if loaded is None else (RuntimeError, *loaded.errors)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time, and on the device behind the turn before, whatever its stream."""
        with self._lock, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            current.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(current)

    def record(self, run: Run) -> Run:
        """See `Graphs.record`."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Compiles kernels and makes workspaces, neither of which may happen in a recording.
            run()
            graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`: it empties the cache of memory for all threads. Others may go
            # on allocating meanwhile, which the mode allows.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)

        def replay() -> tuple[torch.Tensor, ...]:
            graph.replay()
            return results

        return replay
