"""Reading and writing keys and values in vLLM's paged buffers, whatever their layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rag_windows.errors import UnsupportedModelError

_DIGIT = 128
"""Whole numbers up to here are exact in every floating dtype of 16 bits."""


class PagedLayers:
    """The buffers of all layers of one worker.

    A layer's buffer is (blocks, kv heads, tokens of a block, content). How keys and values lie in
    the last three dimensions is the attention backend's own affair; on CPUs it depends on the
    processor. The backend itself writes; to read, it is made to write numbered tokens into block 0
    once, which vLLM gives to no request, and tells thereby where each number lies.

    Args:
        layers: vLLM's attention layers, in order; each has its buffer bound.
        block_tokens: tokens of one of the scheduler's blocks; a kernel's blocks may be smaller.

    Raises:
        UnsupportedModelError: the buffers don't hold keys and values number by number.
    """

    def __init__(self, layers: Sequence[Any], block_tokens: int) -> None:
        self._layers, self._block_tokens = list(layers), block_tokens
        buffer = layers[0].kv_cache
        if any(one.kv_cache.shape[1:] != buffer.shape[1:] for one in layers) or buffer.ndim != 4:
            shapes = sorted({tuple(one.kv_cache.shape[1:]) for one in layers})
            raise UnsupportedModelError(
                f"The layers' blocks have the shapes {shapes}. Models whose layers differ are not "
                "supported in vLLM. Use rag-windows' own engine."
            )
        self.count = len(self._layers)
        self.dtype, self.device = buffer.dtype, buffer.device
        self.heads, self._step = buffer.shape[1:3]
        self.width = layers[0].head_size
        self._places = self._find_places()

    def read(self, blocks: Sequence[int], count: int) -> list[torch.Tensor]:
        """Keys and values of a request's first tokens.

        Returns:
            Per layer, (2, kv heads, tokens, head dim), in the buffers' dtype and on their device.
        """
        pages = self._slots(blocks, 0, count)[:: self._step] // self._step
        shape = len(pages), 2, self._step, self.heads, self.width
        found = []
        for layer in self._layers:
            numbers = layer.kv_cache[pages].flatten(1)[:, self._places].view(shape)
            tokens = numbers.transpose(0, 1).flatten(1, 2)[:, :count]
            found.append(tokens.transpose(1, 2).contiguous())
        return found

    def write(
        self,
        layer: int,
        blocks: Sequence[int],
        first: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Put one layer's keys and values, (kv heads, tokens, head dim), from token `first` on."""
        slots = self._slots(blocks, first, first + keys.shape[1])
        self._store(self._layers[layer], [keys.transpose(0, 1), values.transpose(0, 1)], slots)

    def _slots(self, blocks: Sequence[int], first: int, last: int) -> torch.Tensor:
        tokens = torch.arange(first, last, device=self.device)
        pages = torch.tensor(list(blocks), device=self.device)
        return (
            pages[tokens // self._block_tokens] * self._block_tokens + tokens % self._block_tokens
        )

    def _store(self, layer: Any, both: Iterable[torch.Tensor], slots: torch.Tensor) -> None:
        """Let the backend write keys and values, (tokens, kv heads, head dim)."""
        rows = [one.to(self.device, self.dtype).contiguous() for one in both]
        layer.impl.do_kv_cache_update(layer, *rows, layer.kv_cache, slots)

    def _find_places(self) -> torch.Tensor:
        """Where in a block the numbers are, of (2, tokens, kv heads, head dim) in a row."""
        layer, size = self._layers[0], 2 * self._step * self.heads * self.width
        numbers = torch.arange(size, device=self.device)
        digits = numbers.view(2, self._step, self.heads, self.width)
        slots = torch.arange(self._step, device=self.device)
        found = torch.zeros(layer.kv_cache[0].numel(), dtype=torch.int64, device=self.device)
        worth = 1
        while worth < size:
            self._store(layer, digits // worth % _DIGIT, slots)
            found += worth * layer.kv_cache[0].flatten().double().round().long()
            worth *= _DIGIT
        if len(found) != size or not torch.equal(found.sort().values, numbers):
            raise UnsupportedModelError(
                f"The attention backend {type(layer.impl).__name__} does not keep keys and values "
                "number by number, so windows can't be read from it. Choose another backend and "
                "an unquantized KV cache."
            )
        return found.argsort()
