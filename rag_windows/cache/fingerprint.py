"""What a model and a tokenizer are, as far as keys and values of windows depend on them."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import transformers
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from rag_windows.attention.twin import Twin
from rag_windows.cache.keys import fields
from rag_windows.cache.weights import (
    STRETCH,
    digests,
    plain_tensors,
    samples,
    stretches,
    version_of,
)
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
    """The fingerprint of a tokenizer, read again when its size or its template changes.

    Args:
        tokenizer: a transformers tokenizer, or None for work with token ids.
    """

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

_HARMLESS_HOOKS = "transformers.utils.output_capturing"
"""transformers installs these on first use; they only take notes."""

_DEEPEST = 4
"""Functions around functions that are read."""


class _Look:
    """A model's modules, and what of them one check looks at; made anew when they change."""

    def __init__(self, twin: Twin) -> None:
        self.version = twin.version
        modules = list(twin.model.named_modules())
        places = [
            (f"{name}.{kind}", getattr(module, kind))
            for name, module in modules
            for kind in ("_parameters", "_buffers")
        ]
        self._places = places
        self._homes = [home for _, home in places]
        self._hooks = [
            hooks
            for _, module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._loose = [(name, module) for name, module in modules if _has_tensors(module)]
        self.offloaded = _offloaded(modules)
        self._switches = [
            value
            for _, module in modules
            if not isinstance(module, PreTrainedModel)
            for key, value in module.__dict__.items()
            if isinstance(value, dict | list) and value and counts(key) and is_plain(value)
        ]
        self._set: list[Any] = []
        self._written = b""
        self.readable = not any(_is_unreadable(module) for _, module in modules)
        kinds = {base for _, module in modules for base in type(module).__mro__}
        code = sorted(itertools.chain.from_iterable(map(_code, kinds)))
        self.structure = hashlib.sha256(
            fields(
                canonical(twin.model.config.to_dict()),
                canonical(code),
                canonical([_functions(module) for _, module in modules]),
                *(describe(name, module) for name, module in modules),
            )
        ).digest()

    def switches(self) -> bytes:
        """Plain dictionaries and lists of modules, such as adapters' scales, as they are now."""
        if self._set != self._switches or not self._written:
            self._set = copy.deepcopy(self._switches)
            self._written = hashlib.sha256(canonical(self._set)).digest()
        return self._written

    def held(self) -> list[Any]:
        """Parameters and buffers as they stand, None among them."""
        return list(itertools.chain.from_iterable(map(dict.values, self._homes)))

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The ordinary tensors that the model computes with, by name."""
        found: list[tuple[str, torch.Tensor]] = []
        for home, values in self._places:
            for own, value in values.items():
                name = f"{home}.{own}"
                if value is not None and name not in self.offloaded:
                    found += plain_tensors(name, value)
        for name, module in self._loose:
            found += plain_tensors(name, _Loose(module))
        return found

    @property
    def hooked(self) -> bool:
        """Whether hooks that may change what is computed are installed."""
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


class _Read:
    """What a model's weights held when they were read."""

    def __init__(self, look: _Look, before: _Read | None, *, trusted: bool) -> None:
        self.version = look.version
        held = look.held()
        named = look.tensors()
        self.tensors = [tensor for _, tensor in named]
        self.held = [id(value) for value in held]
        # Parts of quantized weights and loose tensors can be replaced under the same parameter.
        self._made_of_parts = {id(t) for t in held if t is not None} != {
            id(t) for t in self.tensors
        }
        self.states = self._states(self.tensors)
        tied: dict[tuple[Any, ...], int] = {}
        unique: list[torch.Tensor] = []
        places: list[int] = []
        for tensor in self.tensors:
            layout = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            key = layout if tensor.data_ptr() else (id(tensor),)
            if key not in tied:
                tied[key] = len(unique)
                unique.append(tensor)
            places.append(tied[key])
        known = digests(unique, trusted=trusted)
        described = [
            fields(name.encode(), tensor.device.type.encode(), known[place].sha256)
            for (name, tensor), place in zip(named, places, strict=True)
        ]
        for name, (kept, own) in look.offloaded.items():
            described.append(fields(name.encode(), digests([kept[own]])[0].sha256))
        self.contents = hashlib.sha256(fields(*described)).digest()
        self._sums = [total for digest in known for total in digest.sums]
        self._stretches = [read for tensor in unique for read in stretches(tensor)]
        self._lengths = [
            min(STRETCH, tensor.nbytes - start)
            for tensor in unique
            for start in range(0, tensor.nbytes, STRETCH)
        ]
        self._turn: int = 0 if before is None else before._turn % max(1, len(self._sums))
        self._samples = samples(unique)
        self._sampled = b"".join(read() for read in self._samples)

    @staticmethod
    def _states(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        try:
            return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
        except RuntimeError:  # tensors of inference mode count no changes
            return [(version_of(tensor), tensor.data_ptr()) for tensor in tensors]

    def counted(self, look: _Look) -> bool:
        """Whether all tensors are the same by PyTorch's own count."""
        if self.version != look.version or self.held != [id(value) for value in look.held()]:
            return False
        tensors = self.tensors
        if self._made_of_parts:
            now = [tensor for _, tensor in look.tensors()]
            if [id(tensor) for tensor in now] != [id(tensor) for tensor in tensors]:
                return False
        return self._states(tensors) == self.states

    @torch.no_grad()
    def holds(self, most: int) -> bool:
        """Whether what is looked at of the contents is what it was.

        Args:
            most: bytes to sum.
        """
        if b"".join([read() for read in self._samples]) != self._sampled:
            return False
        count, summed = len(self._sums), 0
        for _ in range(count):
            place = self._turn
            if self._stretches[place]() != self._sums[place]:
                return False
            self._turn = (place + 1) % count
            summed += self._lengths[place]
            if summed >= most:
                break
        return True


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

    Args:
        model: the plain model.
        twin: the one that encodes.
        revision: that the model was loaded by, if any.
        probe_bytes: see above.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        twin: Twin,
        revision: str | None = None,
        probe_bytes: int = PROBE_BYTES,
    ) -> None:
        self._model = model
        self._twin = twin
        self._revision = revision
        self._probe_bytes = probe_bytes
        self._lock = Lock()
        self._look = _Look(twin)
        self._read: _Read | None = None

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
                self._look = _Look(self._twin)
            look, read = self._look, self._read
            if not look.readable or look.hooked:
                return None
            if read is None:
                read = _Read(look, None, trusted=False)
            elif not read.counted(look):
                read = _Read(look, read, trusted=True)
            elif not read.holds(self._probe_bytes):
                read = _Read(look, read, trusted=False)
            self._read = read
        device = input_device(self._twin.model)
        commit = getattr(self._model.config, "_commit_hash", None)
        return hashlib.sha256(
            fields(
                look.structure,
                read.contents,
                look.switches(),
                canonical([self._revision, commit, _arithmetic(device)]),
            )
        ).digest()


class _Loose:
    """The tensors that a module keeps as plain attributes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.__dict__.update(
            {key: v for key, v in module.__dict__.items() if isinstance(v, torch.Tensor)}
        )


def _has_tensors(module: torch.nn.Module) -> bool:
    return any(isinstance(value, torch.Tensor) for value in module.__dict__.values())


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
        if isinstance(value, types.FunctionType) and depth < _DEEPEST:
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
