"""What a model and a tokenizer are, as far as keys and values of windows depend on them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from rag_windows.cache.description import canonical, counts, describe, is_plain
from rag_windows.cache.keys import fields
from rag_windows.cache.weights import (
    Digest,
    State,
    digests,
    plain_tensors,
    same,
    state_of,
)
from rag_windows.device import input_device

PROBE_BYTES = 256 << 20
"""Weights that one check reads again; see `ModelIdentity`."""

_HARMLESS_HOOKS = "transformers.utils.output_capturing"
"""transformers installs these on first use; they only take notes."""


@dataclass(frozen=True, slots=True)
class _Read:
    """The model as it was when it was read whole."""

    states: tuple[State, ...]
    known: tuple[Digest, ...]
    contents: bytes


class ModelIdentity:
    """The fingerprint of one model, kept true while the model is used.

    It covers every parameter and buffer by the sha256 of its bytes (tied ones once, parts and
    scales of quantized ones included), their names, dtypes and devices' kinds, the whole config
    (rope, windows, softcaps, quantization), the classes and plain attributes of all modules
    (adapters' scales and switches too), the revision, and the versions of torch and transformers.

    Weights are read whole once. Each later call checks again:

    - that every tensor is the same object at the same address with the same count of in-place
      changes: this catches optimizer steps, ``load_state_dict``, ``copy_`` and new tensors;
    - the contents, for what PyTorch does not count (``tensor.data``, numpy, foreign kernels): a
      model of up to `probe_bytes` is summed whole in every call. Of a larger one every tensor is
      sampled at about a thousand places, which catches edits of whole tensors, and `probe_bytes`
      more of them are summed in turn, so that an edit of single elements is caught after
      ``size / probe_bytes`` calls at the latest.
    - Not caught: an edit behind PyTorch's back that leaves all these sums as they were, and one of
      weights that accelerate keeps off the device, which are read once.

    Args:
        model: the plain model.
        twin: the one that encodes.
        revision: that the model was loaded by, if any.
        probe_bytes: see above.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        twin: PreTrainedModel,
        revision: str | None = None,
        probe_bytes: int = PROBE_BYTES,
    ) -> None:
        self._model = model
        self._twin = twin
        self._revision = revision
        self._probe_bytes = probe_bytes
        self._lock = threading.Lock()
        self._read: _Read | None = None
        self._turn = 0
        modules = list(twin.named_modules())
        self._homes = [
            (f"{name}.{kind}", getattr(module, kind))
            for name, module in modules
            for kind in ("_parameters", "_buffers")
        ]
        self._hooks = [
            hooks
            for _, module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._loose = [(name, module) for name, module in modules if _has_tensors(module)]
        self._offloaded = _offloaded(modules)
        described = [describe(name, module) for name, module in modules]
        self._switches = [
            value
            for _, module in modules
            if not isinstance(module, PreTrainedModel)
            for key, value in module.__dict__.items()
            if isinstance(value, dict | list) and value and counts(key) and is_plain(value)
        ]
        self._patched = any(_is_patched(module) for _, module in modules)
        self._structure = hashlib.sha256(
            fields(canonical(twin.config.to_dict()), *described)
        ).digest()

    def fingerprint(self) -> bytes | None:
        """32 bytes that only an equal model has; None if nothing can be said about this one.

        That is so while foreign forward hooks, which may change what is computed, are installed.
        """
        if self._patched or self._has_foreign_hooks():
            return None
        read = self._read
        if read is None or not self._unchanged(read):
            read = self._read_again(read)
        device = input_device(self._twin)
        commit = getattr(self._model.config, "_commit_hash", None)
        return hashlib.sha256(
            fields(
                self._structure,
                read.contents,
                canonical([self._revision, commit, self._switches, _arithmetic(device)]),
            )
        ).digest()

    def _read_again(self, outdated: _Read | None) -> _Read:
        with self._lock:
            if self._read is outdated or self._read is None:
                self._read = self._read_whole()
            return self._read

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        for home, values in self._homes:
            for own, value in values.items():
                name = f"{home}.{own}"
                if value is not None and name not in self._offloaded:
                    found += plain_tensors(name, value)
        for name, module in self._loose:
            found += plain_tensors(name, _Loose(module))
        return found

    def _read_whole(self) -> _Read:
        named = self._tensors()
        tied: dict[tuple[Any, ...], int] = {}
        unique: list[torch.Tensor] = []
        places: list[int] = []
        for _, tensor in named:
            layout = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            key = layout if tensor.data_ptr() else (id(tensor),)
            if key not in tied:
                tied[key] = len(unique)
                unique.append(tensor)
            places.append(tied[key])
        known = digests(unique)
        described = [
            fields(name.encode(), tensor.device.type.encode(), known[place].sha256)
            for (name, tensor), place in zip(named, places, strict=True)
        ]
        for name, (kept, own) in self._offloaded.items():
            described.append(fields(name.encode(), digests([kept[own]])[0].sha256))
        states = tuple(state_of(tensor) for _, tensor in named)
        contents = hashlib.sha256(fields(*described)).digest()
        return _Read(states, tuple(known[place] for place in places), contents)

    def _unchanged(self, read: _Read) -> bool:
        tensors = [tensor for _, tensor in self._tensors()]
        if tuple(state_of(tensor) for tensor in tensors) != read.states:
            return False
        once = {id(known): (t, known) for t, known in zip(tensors, read.known, strict=True)}
        pairs = list(once.values())
        whole = self._in_turn([tensor.nbytes for tensor, _ in pairs])
        equal: dict[torch.device, list[torch.Tensor]] = {}
        with torch.no_grad():
            for index, (tensor, known) in enumerate(pairs):
                verdict = same(tensor, known, whole=index in whole)
                equal.setdefault(tensor.device, []).append(verdict)
            return all(bool(torch.cat(verdicts).all()) for verdicts in equal.values())

    def _in_turn(self, sizes: Sequence[int]) -> set[int]:
        """Indices of the tensors that this check sums whole: all of them, or the next few."""
        if sum(sizes) <= self._probe_bytes:
            return set(range(len(sizes)))
        chosen: set[int] = set()
        room = self._probe_bytes
        while room > 0 and len(chosen) < len(sizes):
            self._turn = (self._turn + 1) % len(sizes)
            chosen.add(self._turn)
            room -= sizes[self._turn]
        return chosen

    def _has_foreign_hooks(self) -> bool:
        everywhere = (
            torch_module._global_forward_hooks,
            torch_module._global_forward_pre_hooks,
        )
        return any(
            getattr(hook, "__module__", None) != _HARMLESS_HOOKS
            for hooks in (*everywhere, *self._hooks)
            if hooks
            for hook in hooks.values()
        )


class _Loose:
    """The tensors that a module keeps as plain attributes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.__dict__.update(
            {key: v for key, v in module.__dict__.items() if isinstance(v, torch.Tensor)}
        )


def _has_tensors(module: torch.nn.Module) -> bool:
    return any(isinstance(value, torch.Tensor) for value in module.__dict__.values())


def _is_patched(module: torch.nn.Module) -> bool:
    """Whether somebody put another forward on this one module; accelerate does, rightly."""
    return "forward" in module.__dict__ and getattr(module, "_hf_hook", None) is None


def _offloaded(
    modules: Sequence[tuple[str, torch.nn.Module]],
) -> dict[str, tuple[Mapping[str, torch.Tensor], str]]:
    """Weights that accelerate keeps elsewhere between calls: where, by the name they have here."""
    found: dict[str, tuple[Mapping[str, torch.Tensor], str]] = {}
    for name, module in modules:
        kept = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if kept is None:
            continue
        for kind in ("_parameters", "_buffers"):
            for own, tensor in getattr(module, kind).items():
                if tensor is not None and tensor.device.type == "meta":
                    found[f"{name}.{kind}.{own}"] = (kept, own)
    return found


def _arithmetic(device: torch.device) -> list[Any]:
    """Settings of PyTorch that change the numbers a forward pass gives."""
    kind = device.type
    automatic = torch.is_autocast_enabled(kind)
    settings: list[Any] = [
        torch.__version__,
        transformers.__version__,
        kind,
        str(torch.get_autocast_dtype(kind)) if automatic else None,
        torch.get_float32_matmul_precision(),
    ]
    if kind == "cuda":
        settings += [
            torch.cuda.get_device_capability(device),
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        ]
    return settings
