"""Windows in blocks of memory of their own, and their way between host memory and accelerators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from rag_windows.kv import Window
from rag_windows.loading import input_device

ALIGNMENT = 64
"""Bytes on whose multiples tensors start within a block; what CPU kernels like best."""

_SLACK = 1.25
"""A window is compact if its storage holds at most so many times the window's own bytes."""


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


def compact(window: Window) -> Window:
    """The same window in one block of its own (one a device), so that it keeps no batch alive."""
    tensors = (*window.keys, *window.values)
    if _flat(tensors) is not None:
        return window
    made = list(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        block = in_one_block([tensors[index] for index in places], device)
        for index, tensor in zip(places, block, strict=True):
            made[index] = tensor
    return _rebuilt(window, made)


def layer_devices(model: PreTrainedModel, layers: int) -> tuple[torch.device, ...]:
    """Where each layer's attention is computed."""
    first = input_device(model)
    found = [first] * layers
    for module in model.modules():
        index = module.__dict__.get("layer_idx")
        if not isinstance(index, int) or not 0 <= index < layers:
            continue
        weight = next(module.parameters(recurse=False), None)
        if weight is None:
            weight = next(module.parameters(), None)
        if weight is None:
            continue
        hook = getattr(module, "_hf_hook", None)
        placed = getattr(hook, "execution_device", None)
        if weight.device.type != "meta":
            found[index] = weight.device
        elif placed is not None:
            found[index] = torch.device("cuda", placed) if isinstance(placed, int) else placed
    return tuple(found)


class Mover:
    """Brings windows to where a model's layers are.

    On CUDA the copies run on a stream of their own: between `start` and `finish` the model can
    encode other windows. Pinned host memory is copied without the processor's help.

    Args:
        devices: of each layer.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._streams = {
            device: torch.cuda.Stream(device)
            for device in dict.fromkeys(self._devices)
            if device.type == "cuda"
        }
        self._used: list[tuple[torch.device, torch.Tensor]] = []

    def start(self, window: Window) -> Window:
        """Begin to copy a window; its tensors may be read after `finish`."""
        tensors = (*window.keys, *window.values)
        wanted = (*self._devices, *self._devices)
        if all(tensor.device == device for tensor, device in zip(tensors, wanted, strict=True)):
            return window
        flat = _flat(tensors)
        if flat is not None and len(set(wanted)) == 1:
            moved = self._copy(flat, wanted[0])
            return _rebuilt(window, [_same_part(moved, tensor) for tensor in tensors])
        return _rebuilt(
            window, [self._copy(t, device) for t, device in zip(tensors, wanted, strict=True)]
        )

    def finish(self) -> None:
        """Make the current stream wait for the copies."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        for device, tensor in self._used:
            # The allocator must not hand this memory out while the current stream reads it.
            tensor.record_stream(torch.cuda.current_stream(device))
        self._used.clear()

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        stream = self._streams.get(device)
        if stream is None:
            return tensor.to(device)
        if tensor.device.type == "cuda":
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            moved = tensor.to(device, non_blocking=True)
        self._used.append((device, moved))
        return moved


def to_host(window: Window) -> Window:
    """A compact window in host memory, pinned if it comes from CUDA; waits for the copy.

    For a thread of its own: it uses a stream of its own, so that the model's is not held up.
    """
    window = compact(window)
    tensors = (*window.keys, *window.values)
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return window
    flat = _flat(tensors)
    if flat is None:
        return compact(_rebuilt(window, [tensor.cpu() for tensor in tensors]))
    if flat.device.type != "cuda":
        host = flat.cpu()
    else:
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        stream = torch.cuda.Stream(flat.device)
        with torch.cuda.stream(stream):
            host.copy_(flat, non_blocking=True)
        stream.synchronize()
    return _rebuilt(window, [_same_part(host, tensor) for tensor in tensors])


def ready(devices: Sequence[torch.device]) -> Callable[[], None]:
    """Mark what the current streams have been given; the result waits until that is done."""
    events = []
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bytes of the one storage that these tensors fill, or None if there is no such one."""
    storage = tensors[0].untyped_storage()
    own = 0
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage.data_ptr() or not tensor.is_contiguous():
            return None
        own += tensor.nbytes
    if storage.nbytes() > own * _SLACK + ALIGNMENT * len(tensors):
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)


def _same_part(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The part of `flat` that `tensor` is of its own storage."""
    start = tensor.storage_offset() * tensor.element_size()
    return flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _rebuilt(window: Window, tensors: Sequence[torch.Tensor]) -> Window:
    layers = len(window.keys)
    return Window(window.ids, window.start, tuple(tensors[:layers]), tuple(tensors[layers:]))
