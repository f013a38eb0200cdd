"""One block of memory that holds a window's tensors, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT = 64
"""Bytes; what CPU kernels like best, and the alignment of tensors in files."""


def in_one_block(
    tensors: Sequence[torch.Tensor], device: torch.device, *, pin: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the tensors as contiguous views of one block on a device that holds just them.

    A slice keeps the whole batch that it was cut from alive; these don't. Tensors that share such a
    block already are returned as they are.

    Args:
        tensors: of any shapes and dtypes, on any devices.
        device: where the block is to be.
        pin: put the block into page-locked host memory, from which copies to an accelerator run
            beside its other work.

    Raises:
        MemoryError: if there is no room for the block.
    """
    if _is_block(tensors, device, pin=pin):
        return tuple(tensor.detach() for tensor in tensors)
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    try:
        block = torch.empty(end, dtype=torch.uint8, device=device, pin_memory=pin)
    except RuntimeError as error:  # what torch's allocators raise
        raise MemoryError(f"no {end} bytes on {device}") from error
    copies = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        copy = block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor.detach(), non_blocking=pin))
    if pin:
        torch.cuda.synchronize()
    return tuple(copies)


def block_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that tensors keep alive: those of their blocks, each counted once.

    Page-locked blocks count as torch allocates them, rounded up to a power of two.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size and tensor.device.type == "cpu" and torch.cuda.is_available():
            size = 1 << (size - 1).bit_length() if tensor.is_pinned() else size
        sizes[storage.data_ptr()] = size
    return sum(sizes.values())


def _is_block(tensors: Sequence[torch.Tensor], device: torch.device, *, pin: bool) -> bool:
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) != 1 or any(tensor.device != device for tensor in tensors):
        return False
    needed = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    return (
        tensors[0].untyped_storage().nbytes() <= needed
        and all(tensor.is_contiguous() for tensor in tensors)
        and (not pin or tensors[0].is_pinned())
    )
