"""Where models go, and where a model wants its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from rag_windows.errors import InputError


def best_device() -> str:
    """What ``device_map`` is unless it is given: "cpu", "cuda", or "auto" for several of them."""
    count = _cuda_devices()
    return "cpu" if count == 0 else "cuda" if count == 1 else "auto"


def check_device(asked: Any, argument: str = "device_map=") -> None:
    """Refuse a CUDA device that is not there.

    Args:
        asked: a ``device_map``: a name, a number, a device, or a mapping to these.
        argument: how the message calls it.

    Raises:
        InputError: saying how many devices there are.
    """
    for device in asked.values() if isinstance(asked, Mapping) else [asked]:
        name = f"cuda:{device}" if isinstance(device, int) else str(device)
        if name.partition(":")[0] != "cuda":
            continue
        number = name.partition(":")[2]
        count = _cuda_devices()
        if (number and not number.isdecimal()) or int(number or 0) >= count:
            there = f"PyTorch sees {count} CUDA devices" if count else "PyTorch sees no CUDA device"
            raise InputError(
                f"{argument}{asked}: {there}; use cpu, or leave it out for the best device."
            )


def autocast_here() -> Callable[[], AbstractContextManager[None]]:
    """What switches autocast on in another thread as it is in this one, now."""
    kinds = [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]
    modes = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextmanager
    def there() -> Iterator[None]:
        with ExitStack() as scope:
            for kind, dtype in modes:
                scope.enter_context(torch.autocast(kind, dtype=dtype))
            yield

    return there


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that token ids go to.

    Weights that accelerate keeps offloaded stand on the meta device between calls; the device
    they are computed on is known to its hooks alone.
    """
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "cpu"))
