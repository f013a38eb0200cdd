"""Windows between host memory and accelerators: one buffer a window, one copy a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from rag_windows.kv import Window
from rag_windows.loading import input_device

ALIGNMENT = 64
"""Bytes on whose multiples tensors start within a buffer."""

_SLACK = 1.25
"""A window is compact if its storage holds at most so many times the window's own bytes."""

HOST = torch.device("cpu")


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


def is_finite(window: Window) -> bool:
    """Whether no key or value is NaN or infinite: one pass over them, one wait per device."""
    verdicts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in (*window.keys, *window.values):
        # A sum is NaN or infinite if anything in it is, and needs no mask of the tensor's size. It
        # may overflow by itself where all is well, so only a bad one is looked at closely.
        verdicts.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
    if all(bool(torch.stack(sums).isfinite().all()) for sums in verdicts.values()):
        return True
    return all(bool(t.isfinite().all()) for t in (*window.keys, *window.values))


def compact(window: Window) -> Window:
    """The same window in one buffer of its own (one a device), so that it keeps no batch alive."""
    tensors = (*window.keys, *window.values)
    if _flat(tensors) is not None:
        return window
    sizes: dict[torch.device, int] = {}
    places = []
    for tensor in tensors:
        start = sizes.get(tensor.device, 0)
        places.append(start)
        sizes[tensor.device] = -(-(start + tensor.nbytes) // ALIGNMENT) * ALIGNMENT
    buffers = {
        device: torch.empty(size, dtype=torch.uint8, device=device)
        for device, size in sizes.items()
    }
    made = []
    for tensor, start in zip(tensors, places, strict=True):
        part = buffers[tensor.device][start : start + tensor.nbytes]
        made.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor))
    return _rebuilt(window, made)


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
