"""Where a model wants its inputs."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


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
