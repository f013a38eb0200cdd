"""Fingerprints of all in a model and a tokenizer that keys and values of windows depend on."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from rag_windows.attention.mirror import ModelMirror
from rag_windows.attention.native.linear import class_of_viewed
from rag_windows.cache.keys import NO_TOKENIZER, fields
from rag_windows.cache.weight_sums import WeightSums, checkpoint_of
from rag_windows.loading import input_device, layer_devices
from rag_windows.prefill import ModelEncoder
from rag_windows.threads import Lock

logger = logging.getLogger(__name__)

_NOT_COMPUTED_WITH = {
    # Names and notes of a config or module that change no number, or change while it is used.
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "use_cache",
    "_attn_implementation",
    "_attn_implementation_internal",
    "attn_implementation",
    "training",
    "gradient_checkpointing",
    "warnings_issued",
    "max_seq_len_cached",
}
_COUNTED_PRIVATE = {"_active_adapter", "_disable_adapters", "_commit_hash"}
_LIBRARIES = {"torch", "transformers", "accelerate", "peft"}
_HARMLESS_HOOKS = "transformers.utils.output_capturing"  # installed on first use; only records
_ORDINARY = torch.Tensor, torch.nn.Parameter
_SAMPLES = 16  # bytes of a tensor that every check reads
_CHUNK = 64 << 20
_DEEPEST_PART = 3
_HASHERS = 8


def canonical(value: Any) -> bytes:
    """Plain data as JSON that is the same for equal data; names that change nothing left out."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            f"{type(key).__name__}:{key}": _plain(v) for key, v in value.items() if _counts(key)
        }
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(entry), sort_keys=True) for entry in value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return repr(value) if isinstance(value, float) else f"{type(value).__name__}:{value}"


def _counts(name: Any) -> bool:
    """Whether an attribute or config entry of this name can change what is computed."""
    if name in _COUNTED_PRIVATE:
        return True
    private = isinstance(name, str) and name.startswith("_")
    return not private and name not in _NOT_COMPUTED_WITH


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str | int) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(fields(*parts)).digest()


class TokenizerIdentity:
    """The fingerprint of a tokenizer, read again when its size or its template changes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._seen: tuple[Any, ...] | None = None
        self._print = NO_TOKENIZER

    def fingerprint(self) -> bytes:
        """32 bytes that only an equal tokenizer has."""
        if self._tokenizer is None:
            return NO_TOKENIZER
        seen = (len(self._tokenizer), canonical(getattr(self._tokenizer, "chat_template", None)))
        with self._lock:
            if seen != self._seen:
                self._print = tokenizer_fingerprint(self._tokenizer)
                self._seen = seen
            return self._print


def tokenizer_fingerprint(tokenizer: Any) -> bytes:
    """Read a tokenizer whole; padding and truncation, which callers switch, do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Both stand in front of the rules. Inside a string the quotes would be escaped, and to read
        # and sort a large vocabulary takes longer than the weights.
        whole = backend.to_str()
        rules = whole[max(0, whole.find('"added_tokens"')) :]
    else:
        vocabulary = [
            tokenizer.get_vocab(),
            {str(number): repr(token) for number, token in tokenizer.added_tokens_decoder.items()},
        ]
        rules = json.dumps(vocabulary, sort_keys=True)
    special = getattr(tokenizer, "special_tokens_map", {})
    return _sha256(
        type(tokenizer).__qualname__.encode(),
        rules.encode(),
        canonical({name: str(value) for name, value in special.items()}),
        canonical(getattr(tokenizer, "chat_template", None)),
    )


class ModelIdentity:
    """The fingerprint of one model, updated while the model is used.

    It covers every parameter and buffer by the sha256 of its bytes (parts and scales of quantized
    ones included), their names, dtypes and devices' kinds, the config, the module tree with its
    classes, plain attributes and functions by name, the revision, and the versions of the packages
    that the classes come from. Weights are read whole once. Each later call looks at the module
    tree (`ModelMirror.follow`), at each tensor's address, PyTorch's count of its changes, and a few
    bytes of each; docs/passage_cache.md says what that notices.

    `model` is the plain model, `encoder` runs the one that encodes, `sums` remembers digests of
    weights for other processes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: ModelEncoder,
        revision: str | None = None,
        sums: WeightSums | None = None,
    ) -> None:
        self._sums = sums
        self._model, self._encoder, self._revision = model, encoder, revision
        self._lock = Lock()
        self._reading: _Reading | None = None
        self._warned = False

    def fingerprint(self) -> bytes | None:
        """32 bytes that only an equal model has; None, with one warning, if it is unknown.

        Raises:
            UnsupportedModelError: what the model became can't be split into windows.
        """
        self._encoder.follow()
        encoder = self._encoder.of_windows
        mirror = encoder.mirror
        with self._lock:
            reading = self._reading
            if reading is None or not reading.holds(mirror):
                reading = self._reading = _Reading(mirror, self._sums, encoder.adapter)
            unknown = reading.unknown or reading.hook()
            if unknown and not self._warned:
                self._warned = True
                logger.warning("Windows of this model are not cached: %s", unknown)
            if unknown:
                return None
        commit = getattr(self._model.config, "_commit_hash", None)
        identity = [self._revision, commit, _arithmetic(reading.device)]
        return _sha256(reading.contents, canonical(identity))

    @property
    def devices(self) -> Sequence[torch.device]:
        """Where each layer's attention is computed, as the last call of `fingerprint` found it."""
        return () if self._reading is None else self._reading.devices


class _Reading:
    """What a model was when it was read: its fingerprint, or why that is `unknown`."""

    def __init__(
        self, mirror: ModelMirror, sums: WeightSums | None = None, adapter: str | None = None
    ) -> None:
        self._mirror, self._version = mirror, mirror.version
        self.device, self.devices = input_device(mirror.model), layer_devices(mirror.model)
        self._modules = list(mirror.model.named_modules())
        every = [module for _, module in self._modules]
        self._hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._hooks += [module._forward_hooks for module in every]
        self._hooks += [module._forward_pre_hooks for module in every]
        self._switches = [
            value
            for module in every
            if not isinstance(module, PreTrainedModel)
            for key, value in module.__dict__.items()
            if isinstance(value, dict | list) and value and _counts(key) and _is_plain(value)
        ]
        self._switched = copy.deepcopy(self._switches)
        kinds = {
            base
            for module in every
            for base in class_of_viewed(module).__mro__
            if base is not object
        }
        self.unknown = _strange(kinds, every)
        self.contents = b""
        if self.unknown is None:
            commit = getattr(mirror.model.config, "_commit_hash", None)
            files = [checkpoint_of(mirror.model.name_or_path, commit)]
            files += [] if adapter is None else [checkpoint_of(adapter)]
            known = [one for one in files if one is not None]
            checkpoint = fields(*known) if len(known) == len(files) else None
            code = {kind.__module__ for kind in kinds}
            self._read_weights(mirror, code, sums, checkpoint)

    def _read_weights(
        self,
        mirror: ModelMirror,
        code: set[str],
        sums: WeightSums | None,
        checkpoint: bytes | None,
    ) -> None:
        away: dict[str, torch.Tensor] = {}  # what accelerate stores elsewhere between calls
        self._places: list[tuple[str, Mapping[str, Any]]] = []
        for name, module in self._modules:
            offloaded: Any = getattr(module.__dict__.get("_hf_hook"), "weights_map", None)
            for kind in ("_parameters", "_buffers"):
                values = getattr(module, kind)
                self._places.append((f"{name}.{kind}", values))
                for own, value in values.items() if offloaded is not None else ():
                    if value is not None and value.device.type == "meta":
                        away[f"{name}.{kind}.{own}"] = offloaded[own]
            if any(isinstance(value, torch.Tensor) for value in module.__dict__.values()):
                self._places.append((f"{name}.", module.__dict__))
        found = self._tensors()
        self._own = [tensor for *_, tensor in found]
        self._counted = [tensor for tensor in self._own if not tensor.is_inference()]
        self._counts, self._addresses = self._changes(), self._memory()
        self._samples = _samples(self._own)
        self._sampled = _bytes_of(self._samples)
        named = [(f"{home}.{own}", tensor) for home, own, tensor in found]
        named = [(name, one) for name, one in named if name not in away] + [*away.items()]
        unique = list({id(tensor): tensor for _, tensor in named}.values())
        digests = dict(zip(map(id, unique), _digests_of(unique, checkpoint, sums), strict=True))
        self.contents = _sha256(
            canonical(mirror.model.config.to_dict()),
            canonical(sorted(f"{source} {_origin(source)}" for source in code)),
            canonical(self._switched),
            *(_described(name, module) for name, module in self._modules),
            *(
                fields(name.encode(), tensor.device.type.encode(), digests[id(tensor)])
                for name, tensor in named
            ),
        )

    def holds(self, mirror: ModelMirror) -> bool:
        """Whether the model is unchanged since it was read, by a quick check."""
        if self._mirror is not mirror or self._version != mirror.version:
            return False
        if self._switched != self._switches:
            return False
        if self.unknown is not None:
            return True
        now = self._tensors()
        return (
            len(now) == len(self._own)
            and all(tensor is own for (*_, tensor), own in zip(now, self._own, strict=True))
            and self._counts == self._changes()
            and self._addresses == self._memory()
            and self._sampled == _bytes_of(self._samples)
        )

    def hook(self) -> str | None:
        """A hook that may change what is computed."""
        for hooks in filter(None, self._hooks):
            for hook in hooks.values():
                if getattr(hook, "__module__", None) != _HARMLESS_HOOKS:
                    return f"{hook!r} is a forward hook, which may change what is computed"
        return None

    def _tensors(self) -> list[tuple[str, str, torch.Tensor]]:
        """The ordinary tensors that the model computes with, after the two parts of a name."""
        found: list[tuple[str, str, torch.Tensor]] = []
        for home, values in self._places:
            for own, value in values.items():
                if type(value) in _ORDINARY and not value.__dict__:
                    found.append((home, own, value))
                elif isinstance(value, torch.Tensor):
                    found += ((home, *part) for part in plain_tensors(own, value))
        return found

    def _changes(self) -> list[int]:
        """PyTorch's counts of changes in place; there are none of what inference mode made."""
        return [*map(_version_of, self._counted)]

    def _memory(self) -> list[int]:
        """The addresses of the tensors' memory."""
        return [*map(torch.Tensor.data_ptr, self._own)]


_version_of = attrgetter("_version")


def _described(name: str, module: torch.nn.Module) -> bytes:
    """A module's place, class, plain attributes, and functions by name."""
    kind, plain = class_of_viewed(module), {}
    if not isinstance(module, PreTrainedModel):
        # Containers among them are looked at in every call.
        plain = {
            key: _called(value) if callable(value) else value
            for key, value in module.__dict__.items()
            if _counts(key) and (callable(value) or _is_plain(value))
            if key != "forward" and not isinstance(value, dict | list)
        }
    place = fields(name.encode(), kind.__module__.encode(), kind.__qualname__.encode())
    return place + canonical(plain)


def _called(value: Any) -> list[Any]:
    """A function by its name; of a partial one what it is given, too."""
    function = _plain_function(value)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    given = [*getattr(value, "args", ()), *sorted(getattr(value, "keywords", {}).items())]
    return [f"{function.__module__}.{name}", *given]


def _strange(kinds: Iterable[type], modules: Iterable[torch.nn.Module]) -> str | None:
    """Why names of classes and functions do not identify what a model computes, if so."""
    for kind in kinds:
        if _origin(kind.__module__) is None:
            return f"the source of {kind.__qualname__} is unknown"
        known = _LIBRARIES | sys.stdlib_module_names | {_package(kind.__module__)}
        for name, value in kind.__dict__.items():
            if isinstance(value, types.FunctionType) and (
                not _packages(value) <= known
                or (name == "forward" and value.__module__ != kind.__module__)
            ):
                return f"{kind.__qualname__}.{name} was replaced by {value.__qualname__}"
    for module in modules:
        for name, value in module.__dict__.items():
            if isinstance(value, torch.ScriptObject):
                return f"{type(module).__qualname__}.{name} holds weights that can't be read"
            if name == "forward":  # accelerate replaces it, rightly
                replaced = "_hf_hook" not in module.__dict__
            else:
                replaced = callable(value) and _counts(name) and not _packages(value) <= _LIBRARIES
            if replaced:
                return f"{type(module).__qualname__}.{name} was replaced on one module"
    return None


def _plain_function(value: Any) -> Any:
    return getattr(value, "func", getattr(value, "__func__", value))


def _packages(value: Any) -> set[str]:
    """Packages that a function comes from, whatever name `functools.wraps` gave it."""
    function = _plain_function(value)
    module = getattr(function, "__module__", None) or ""
    return {
        _package(getattr(function, "__globals__", {}).get("__name__", module)),
        _package(module),
    }


def _package(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def _origin(module: str) -> str | None:
    """What identifies a module's code: the version of its package, else a digest of its source."""
    package = _package(module)
    if package in sys.stdlib_module_names:
        return package
    version = getattr(sys.modules.get(package), "__version__", None)
    if version is not None:
        return f"{package} {version}"
    try:
        source = Path(getattr(sys.modules.get(module), "__file__", None) or "").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(source).hexdigest()


_lock = Lock()
_digests: WeakIdKeyDictionary = WeakIdKeyDictionary()


@torch.no_grad()
def _digests_of(
    tensors: Sequence[torch.Tensor], checkpoint: bytes | None, sums: WeightSums | None
) -> list[bytes]:
    """The sha256 of each tensor.

    A tensor is read whole, unless it was read before and seems unchanged, or a digest is stored for
    its fast checksum and the model's checkpoint. The files count because a tensor that shares a
    fast checksum with another can be made on purpose.
    """
    seen = [(_state_of(tensor), _bytes_of(_samples([tensor]))) for tensor in tensors]
    with _lock:
        known = [_digests.get(tensor, (None, b"")) for tensor in tensors]
    places = [place for place, (before, _) in enumerate(known) if before != seen[place]]
    unread = [tensors[place] for place in places]
    found = {place: bytes(digest) for place, (_, digest) in enumerate(known)}
    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1), "rag-windows-hash") as pool:

        def read() -> list[bytes]:
            return [*pool.map(functools.partial(_hashed, hash_with=hashlib.sha256), unread)]

        if sums is None or checkpoint is None or not unread:
            made: Sequence[bytes] = read()
        else:
            checksums = pool.map(functools.partial(_hashed, hash_with=xxhash.xxh3_128), unread)
            made = sums.digests(checkpoint, [*checksums], read)
    found |= dict(zip(places, made, strict=True))
    with _lock:
        for place, digest in zip(places, made, strict=True):
            _digests[tensors[place]] = seen[place], digest
    return [found[place] for place in range(len(tensors))]


@torch.no_grad()
def _hashed(tensor: torch.Tensor, hash_with: Callable[[bytes], Any]) -> bytes:
    """A hash of the dtype, the shape, and the bytes in row-major order."""
    made = hash_with(fields(str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode()))
    numbers = flat(tensor)
    for start in range(0, numbers.numel(), _CHUNK):
        made.update(numbers[start : start + _CHUNK].cpu().numpy().data)
    return bytes(made.digest())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in row-major order, uint8 (bytes,); no copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _samples(tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[Any]]:
    """Views of a few bytes, spread evenly, of each tensor that stands in one piece; by device.

    In host memory they are numpy's, which joins many small views in a tenth of PyTorch's time.
    """
    found: dict[torch.device, list[Any]] = {}
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.device.type != "meta":
            numbers = flat(tensor)
            # An odd step meets all bytes of a number in turn.
            some = numbers[:: max(1, numbers.numel() // _SAMPLES) | 1]
            on_host = tensor.device.type == "cpu"
            found.setdefault(tensor.device, []).append(some.numpy() if on_host else some)
    return found


@torch.no_grad()
def _bytes_of(samples: Mapping[torch.device, list[Any]]) -> bytes:
    return b"".join(
        (np.concatenate(some) if device.type == "cpu" else torch.cat(some).cpu().numpy()).tobytes()
        for device, some in samples.items()
    )


def _state_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """A tensor's identity, PyTorch's count of its changes, and where its memory is."""
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr()


def plain_tensors(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The ordinary tensors that a value is made of.

    Quantized weights are tensor subclasses with parts (`__tensor_flatten__`), or carry their
    scales in attributes (bitsandbytes' ``quant_state``); both count.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.__dict__:
        yield name, value
        return
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        inner = () if flatten is None else flatten()[0]
        for part in inner:
            yield from plain_tensors(f"{name}.{part}", getattr(value, part), depth + 1)
        if not inner:
            yield name, value
    attributes = getattr(value, "__dict__", None)
    if depth >= _DEEPEST_PART or not isinstance(attributes, dict):
        return
    for key in sorted(attributes, key=str):
        part = attributes[key]
        if isinstance(part, torch.Tensor) or (key == "quant_state" and part is not None):
            yield from plain_tensors(f"{name}.{key}", part, depth + 1)


def _arithmetic(device: torch.device) -> list[Any]:
    """Settings that change the numbers a forward pass gives."""
    kind = device.type
    automatic = torch.is_autocast_enabled(kind)
    settings: list[Any] = [
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
