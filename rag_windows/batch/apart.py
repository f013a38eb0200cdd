"""Which windows are read where they are, rather than put side by side first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.attention.backends import native
from rag_windows.batch.slots import Slot
from rag_windows.cache.block import block_bytes
from rag_windows.windows import Window

_SLACK = 2
"""Times its own bytes that a window of several readers may keep in memory."""


def most_tokens(key: torch.Tensor, value: torch.Tensor, heads: int) -> float:
    """Most tokens of a read that one call of the kernel answers together with other reads.

    Args:
        key: (kv heads, keys, head dim), of the query's dtype.
        value: (kv heads, keys, value dim).
        heads: of the query.

    Returns:
        0 where there is no kernel for such keys and values; infinity where it takes any number.
    """
    if not (native.active() and native.reads(key.dtype, key, value)):
        return 0
    rows = native.most_rows(key.dtype, key.shape[-1], value.shape[-1])
    return rows / (heads // key.shape[0])


def stand_apart(slots: Sequence[Slot], heads: int) -> bool:
    """Whether to leave windows with the same readers where they are.

    Copying them costs more than reading them a few times. It pays where more read them than one
    call of the kernel takes. And it frees memory where a window keeps others of another row's
    alive: those that one forward pass made stand in one block, while a cache has a block for each.

    Args:
        slots: of the windows.
        heads: of a query.
    """
    readers, first = len(slots[0].readers), slots[0].window
    if len(slots) == 1:
        return False
    # Windows of one model are alike but for their lengths.
    layers = zip(first.keys, first.values, strict=True)
    if readers > min(most_tokens(key, value, heads) for key, value in layers):
        return False
    return readers == 1 or all(_keeps_itself_alone(slot.window) for slot in slots)


def _keeps_itself_alone(window: Window) -> bool:
    tensors = (*window.keys, *window.values)
    return block_bytes(tensors) <= _SLACK * sum(tensor.nbytes for tensor in tensors)
