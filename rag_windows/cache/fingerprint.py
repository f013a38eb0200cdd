"""What a model and a tokenizer are, as far as keys and values of windows depend on them."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import os
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import transformers
import xxhash
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from rag_windows.attention.twin import Twin
from rag_windows.cache.keys import fields
from rag_windows.loading import input_device
from rag_windows.threads import Lock

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
_ADAPTER_SWITCHES = {"_active_adapter", "_disable_adapters"}


def canonical(value: Any) -> bytes:
    """Plain data as JSON that is the same for equal data; names that change nothing left out."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {f"{type(key).__name__}:{key}": _plain(v) for key, v in value.items() if counts(key)}
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(entry), sort_keys=True) for entry in value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return repr(value) if isinstance(value, float) else f"{type(value).__name__}:{value}"


def counts(name: Any) -> bool:
    """Whether an attribute or config entry of this name can change what is computed."""
    if name in _ADAPTER_SWITCHES:
        return True
    return name not in _NOT_COMPUTED_WITH and not (
        isinstance(name, str) and name.startswith("_") and name != "_commit_hash"
    )


def is_plain(value: Any) -> bool:
    """Whether a value is plain data through and through."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str | int) and is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def describe(name: str, module: torch.nn.Module) -> bytes:
    """A module's place, class and plain attributes."""
    kind = type(module)
    plain: dict[str, Any] = {}
    if not isinstance(module, PreTrainedModel):
        # Containers among them are read again in every call.
        plain = {
            key: value
            for key, value in module.__dict__.items()
            if counts(key) and is_plain(value) and not isinstance(value, dict | list)
        }
    return fields(name.encode(), kind.__module__.encode(), kind.__qualname__.encode()) + canonical(
        plain
    )


NO_TOKENIZER = hashlib.sha256(b"token ids only").digest()


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
        rules = json.loads(backend.to_str())
        rules.pop("padding", None)
        rules.pop("truncation", None)
    else:
        rules = [
            tokenizer.get_vocab(),
            {str(number): repr(token) for number, token in tokenizer.added_tokens_decoder.items()},
        ]
    special = getattr(tokenizer, "special_tokens_map", {})
    return hashlib.sha256(
        fields(
            type(tokenizer).__qualname__.encode(),
            json.dumps(rules, sort_keys=True).encode(),
            canonical({name: str(value) for name, value in special.items()}),
            canonical(getattr(tokenizer, "chat_template", None)),
        )
    ).digest()


PROBE_BYTES = 2 << 20
"""Weights that one check reads again; see `ModelIdentity`."""

_HARMLESS_HOOKS = "transformers.utils.output_capturing"  # installed on first use; takes notes
_STRETCH = 256 << 10  # bytes that are summed together
_SAMPLES = 16  # bytes of a tensor that every check reads
_CHUNK = 64 << 20
_DEEPEST_FUNCTION, _DEEPEST_PART = 4, 3
_HASHERS = 8

State = tuple[int, int]
"""Of a tensor: PyTorch's count of in-place changes, and where its memory is."""


class ModelIdentity:
    """The fingerprint of one model, kept true while the model is used.

    It covers every parameter and buffer by the sha256 of its bytes (tied ones once, parts and
    scales of quantized ones included), their names, dtypes and devices' kinds, the whole config
    (rope, windows, softcaps, quantization), the classes and plain attributes of all modules
    (adapters' scales and switches too), the revision, and the versions of torch and transformers.

    Weights are read whole once. Each later call checks again, in about a millisecond:

    - the modules, their attributes, configs and classes, see `Twin.follow`;
    - that every tensor is the same object at the same address with the same count of in-place
      changes: this catches optimizer steps, ``load_state_dict``, ``copy_`` and new tensors;
    - the contents, for what PyTorch does not count (``tensor.data``, numpy, foreign kernels): 16
      bytes of every tensor, spread evenly, which catches edits of whole tensors, and `probe_bytes`
      in turn, so that any edit is caught after ``size / probe_bytes`` calls at the latest, and in
      models of up to `probe_bytes` at once.
    - Not caught: an edit of weights that accelerate keeps off the device, which are read once, and
      of what only code holds: variables of modules, closures.

    `model` is the plain model, `twin` the one that encodes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        twin: Twin,
        revision: str | None = None,
        probe_bytes: int = PROBE_BYTES,
    ) -> None:
        self._model, self._twin, self._revision = model, twin, revision
        self._probe_bytes = probe_bytes
        self._lock = Lock()
        self._look = _Look(twin)
        self._weights: _Weights | None = None

    def fingerprint(self) -> bytes | None:
        """32 bytes that only an equal model has; None if nothing can be said about this one.

        That is so while foreign forward hooks, which may change what is computed, are installed,
        where a single module has a forward of its own, and where weights can't be read, as those
        that PyTorch's ``quantize_dynamic`` packs.

        Raises:
            UnsupportedModelError: what the model became can't be split into windows.
        """
        self._twin.follow()
        with self._lock:
            if self._look.version != self._twin.version:
                self._look, self._weights = _Look(self._twin), None
            look, weights = self._look, self._weights
            if not look.readable or look.hooked:
                return None
            if weights is not None and weights.counted(look):
                if not weights.holds(self._probe_bytes):
                    weights.forget()
                    weights = None
            else:
                weights = None
            weights = self._weights = weights or _Weights(look)
        commit = getattr(self._model.config, "_commit_hash", None)
        arithmetic = _arithmetic(input_device(self._twin.model))
        said = canonical([self._revision, commit, arithmetic])
        return _sha256(look.structure, weights.contents, look.switches(), said)


class _Look:
    """A model's modules, and what of them one check looks at; made anew when they change."""

    def __init__(self, twin: Twin) -> None:
        self.version = twin.version
        modules = list(twin.model.named_modules())
        every = [module for _, module in modules]
        self._places = [
            (f"{name}.{kind}", getattr(module, kind))
            for name, module in modules
            for kind in ("_parameters", "_buffers")
        ]
        self._hooks = [
            torch_module._global_forward_hooks,
            torch_module._global_forward_pre_hooks,
            *(module._forward_hooks for module in every),
            *(module._forward_pre_hooks for module in every),
        ]
        self._modules = [
            (name, module)
            for name, module in modules
            if any(isinstance(value, torch.Tensor) for value in module.__dict__.values())
        ]
        self.offloaded = _offloaded(modules)
        self._switches = [
            value
            for module in every
            if not isinstance(module, PreTrainedModel)
            for key, value in module.__dict__.items()
            if isinstance(value, dict | list) and value and counts(key) and is_plain(value)
        ]
        self._set: list[Any] | None = None
        self._written = b""
        self.readable = not any(map(_is_unreadable, every))
        kinds = {base for module in every for base in type(module).__mro__}
        self.structure = _sha256(
            canonical(twin.model.config.to_dict()),
            canonical(sorted(itertools.chain.from_iterable(map(_code, kinds)))),
            canonical([_functions(module) for module in every]),
            *(describe(name, module) for name, module in modules),
        )

    def switches(self) -> bytes:
        """Plain dictionaries and lists of modules, such as adapters' scales, as they are now."""
        if self._set != self._switches:
            self._set = copy.deepcopy(self._switches)
            self._written = hashlib.sha256(canonical(self._set)).digest()
        return self._written

    def held(self) -> list[Any]:
        """Parameters and buffers as they stand, None among them."""
        return [value for _, values in self._places for value in values.values()]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The ordinary tensors that the model computes with, by name."""
        found: list[tuple[str, torch.Tensor]] = []
        for home, values in self._places:
            for own, value in values.items():
                name = f"{home}.{own}"
                if value is not None and name not in self.offloaded:
                    found += plain_tensors(name, value)
        for name, module in self._modules:  # those that it keeps as plain attributes
            for own, value in sorted(module.__dict__.items()):
                if isinstance(value, torch.Tensor):
                    found += plain_tensors(f"{name}.{own}", value, 1)
        return found

    @property
    def hooked(self) -> bool:
        """Whether hooks that may change what is computed are installed."""
        return any(
            getattr(hook, "__module__", None) != _HARMLESS_HOOKS
            for hooks in self._hooks
            if hooks
            for hook in hooks.values()
        )


class _Weights:
    """What a model's weights held when they were read."""

    def __init__(self, look: _Look) -> None:
        held, named = look.held(), look.tensors()
        self._held = [id(value) for value in held]
        self._tensors = [tensor for _, tensor in named]
        # Parts of quantized weights and loose tensors can be replaced under the same parameter.
        self._parts = {id(one) for one in held if one is not None} != {*map(id, self._tensors)}
        self._states = [*map(_state_of, self._tensors)]
        unique = list({id(tensor): tensor for tensor in self._tensors}.values())
        with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1), "rag-windows-hash") as pool:
            known = dict(zip(map(id, unique), pool.map(_digest_of_tensor, unique), strict=True))
        described = [
            fields(name.encode(), tensor.device.type.encode(), known[id(tensor)].sha256)
            for name, tensor in named
        ]
        for name, (kept, own) in look.offloaded.items():
            described.append(fields(name.encode(), _digest_of_tensor(kept[own]).sha256))
        self.contents = _sha256(*described)
        self._stretches = [
            (tensor, start, total)
            for tensor in unique
            for start, total in zip(
                range(0, tensor.nbytes, _STRETCH), known[id(tensor)].sums, strict=True
            )
        ]
        self._turn = 0
        self._samples = _samples(unique)
        self._sampled = _together(self._samples)

    def counted(self, look: _Look) -> bool:
        """Whether all tensors are the same by PyTorch's own count."""
        if self._held != [id(value) for value in look.held()]:
            return False
        if self._parts and [*map(id, self._tensors)] != [id(one) for _, one in look.tensors()]:
            return False
        return self._states == [*map(_state_of, self._tensors)]

    @torch.no_grad()
    def holds(self, most: int) -> bool:
        """Whether what is looked at of the contents is what it was; sums so many bytes."""
        if _together(self._samples) != self._sampled:
            return False
        summed = 0
        for _ in self._stretches:
            tensor, start, total = self._stretches[self._turn]
            if _sum(tensor, start) != total:
                return False
            self._turn = (self._turn + 1) % len(self._stretches)
            summed += min(_STRETCH, tensor.nbytes - start)
            if summed >= most:
                break
        return True

    def forget(self) -> None:
        """Have all of them read anew: something changed that nobody counted."""
        with _lock:
            for tensor in self._tensors:
                _digests.pop(tensor, None)


class _Digest(NamedTuple):
    """What one tensor held when it was read whole, and its state then."""

    state: State
    sample: bytes
    sums: tuple[int, ...]
    sha256: bytes


_lock = Lock()
_digests: WeakIdKeyDictionary = WeakIdKeyDictionary()


@torch.no_grad()
def _digest_of_tensor(tensor: torch.Tensor) -> _Digest:
    """Read a tensor whole, unless it was read before and is unchanged as far as one can see."""
    state, sample = _state_of(tensor), _together(_samples([tensor]))
    with _lock:
        known: _Digest | None = _digests.get(tensor)
    if known is not None and (known.state, known.sample) == (state, sample):
        return known
    sums = tuple(_sum(tensor, start) for start in range(0, tensor.nbytes, _STRETCH))
    # Of the dtype, the shape, and the bytes in row-major order.
    digest = hashlib.sha256(fields(str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode()))
    numbers = flat(tensor)
    for start in range(0, numbers.numel(), _CHUNK):
        digest.update(numbers[start : start + _CHUNK].cpu().numpy().data)
    made = _Digest(state, sample, sums, digest.digest())
    with _lock:
        _digests[tensor] = made
    return made


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in row-major order, uint8 (bytes,); no copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _sum(tensor: torch.Tensor, start: int) -> int:
    """Of a stretch of a tensor's bytes; their order counts."""
    stretch = flat(tensor)[start : start + _STRETCH]
    return xxhash.xxh3_64_intdigest(stretch.cpu().numpy().data)


def _samples(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Views of a few bytes, spread evenly, of each tensor that stands in one piece; by device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.device.type != "meta":
            numbers = flat(tensor)
            # An odd step meets all bytes of a number in turn.
            some = numbers[:: max(1, numbers.numel() // _SAMPLES) | 1]
            found.setdefault(tensor.device, []).append(some)
    return list(found.values())


def _together(samples: Sequence[Sequence[torch.Tensor]]) -> bytes:
    return b"".join(torch.cat(list(some)).cpu().numpy().tobytes() for some in samples)


def _state_of(tensor: torch.Tensor) -> State:
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # tensors of inference mode count no changes
        return -1, tensor.data_ptr()


def plain_tensors(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The ordinary tensors that a value is made of.

    Quantized weights are tensor subclasses with parts (`__tensor_flatten__`), or carry their
    scales in attributes (bitsandbytes' ``quant_state``); both count.
    """
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


def _sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(fields(*parts)).digest()


def _is_unreadable(module: torch.nn.Module) -> bool:
    """Whether what a module computes is hidden from us.

    Somebody put another forward on this one module (accelerate does, rightly), or it holds objects
    of TorchScript, such as packed weights.
    """
    own = module.__dict__
    if "forward" in own and getattr(module, "_hf_hook", None) is None:
        return True
    return any(isinstance(value, torch.ScriptObject) for value in own.values())


def _functions(module: torch.nn.Module) -> list[str]:
    """Functions that a module keeps as attributes, such as its activation."""
    return [
        f"{name}={_called(value)}"
        for name, value in sorted(module.__dict__.items())
        if counts(name) and name != "forward" and callable(value)
    ]


def _called(value: Any) -> str:
    """What a callable is, as far as it can be said."""
    if isinstance(value, functools.partial):
        given = [value.args, sorted(value.keywords.items())]
        return f"{_called(value.func)} of {_written(given) if is_plain(given) else ''}"
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return _instructions(value)
    return f"{getattr(value, '__qualname__', type(value).__qualname__)}"


def _code(kind: type) -> list[str]:
    """The methods of a class that others have put there: by name, module and instructions.

    A class's own code is known by its name, and by the versions of torch and transformers. How a
    module is made is not what it computes, and torch.compile puts functions of its own there.
    """
    return [
        f"{kind.__module__}.{kind.__qualname__}.{name}={_instructions(value)}"
        for name, value in kind.__dict__.items()
        if isinstance(value, types.FunctionType)
        and name not in ("__init__", "__setstate__")
        and (name == "forward" or value.__module__ != kind.__module__)
    ]


def _instructions(function: types.FunctionType, depth: int = 0) -> str:
    """What a function is, as far as it can be said: its name, its code, and what it closes over."""
    parts = [function.__module__, function.__qualname__, _digest_of(function.__code__)]
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(value, types.FunctionType) and depth < _DEEPEST_FUNCTION:
            parts.append(_instructions(value, depth + 1))
        else:
            parts.append(_written(value) if is_plain(value) else type(value).__qualname__)
    return f"({' '.join(parts)})"


def _digest_of(code: types.CodeType) -> str:
    digest = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        inner = isinstance(constant, types.CodeType)
        digest.update((_digest_of(constant) if inner else _written(constant)).encode())
    digest.update(repr(code.co_names).encode())
    return digest.hexdigest()


def _written(value: Any) -> str:
    """Plain data, the same in every process."""
    if isinstance(value, set | frozenset):
        return str(sorted(map(_written, value)))
    return repr(value)


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
