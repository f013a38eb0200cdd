"""Which model a profile was made for."""

from __future__ import annotations

import hashlib
import os

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from rag_windows.cache.fingerprint import canonical
from rag_windows.cache.keys import fields
from rag_windows.cache.weights import flat, plain_tensors

_NAMES = ("dtype", "torch_dtype", "quantization_config", "transformers_version")
"""Of a config: how weights are held, which the sampled weights themselves show, and with what the
config was read, which says nothing about the model."""

_SAMPLES = 1024
"""64-bit words of a tensor that are read."""


@dataclass(frozen=True, config=ConfigDict(strict=True))
class ModelFingerprint:
    """A model by name and by content.

    Attributes:
        name: as it was loaded; of a folder, its last part.
        fingerprint: hex digest over its config and a sample of every weight: about a thousand
            places a tensor, which tells models, fine-tunings and precisions apart without reading
            all of it.
    """

    name: str
    fingerprint: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFingerprint:
        """That of a loaded model."""
        path = str(getattr(model.config, "_name_or_path", "") or "")
        # A folder's place says nothing elsewhere, and may say more than its owner wants.
        name = os.path.basename(os.path.normpath(path)) if os.path.isdir(path) else path
        config = {key: value for key, value in model.config.to_dict().items() if key not in _NAMES}
        described, sums = [canonical(config)], []
        for parameter, value in model.named_parameters():
            for part, tensor in plain_tensors(parameter, value.data):
                described.append(f"{part} {tensor.dtype} {tuple(tensor.shape)}".encode())
                if tensor.device.type != "meta" and tensor.numel():
                    sums.append(_sample(tensor).cpu())
        if sums:
            described.append(torch.cat(sums).numpy().tobytes())
        digest = hashlib.sha256(fields(*described)).hexdigest()
        return cls(name or type(model).__name__, digest)

    def mismatch(self, model: PreTrainedModel) -> str | None:
        """What to tell the user of a profile if it was made for another model."""
        own = ModelFingerprint.of(model)
        if own.fingerprint == self.fingerprint:
            return None
        return (
            f"The profile was made for {self.name!r} ({self.fingerprint[:12]}), and this model is "
            f"{own.name!r} ({own.fingerprint[:12]}): other weights, or another precision. Its "
            "numbers may not suit; calibrate again to be sure."
        )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over at most about `_SAMPLES` words, spread evenly; bytes left over do not count."""
    numbers = flat(tensor)
    aligned = numbers[: numbers.numel() // 8 * 8]
    if aligned.storage_offset() % 8:
        aligned = aligned.clone()
    words = aligned.view(torch.int64)
    return words[:: max(1, words.numel() // _SAMPLES)].sum().view(1)
