"""A second view of a model: same weights, our attention, the original untouched."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rag_windows.attention.hook import NAME
from rag_windows.attention.native.linear import class_of_view
from rag_windows.errors import UnsupportedModelError
from rag_windows.threads import in_children


class ModelMirror:
    """A module tree that shares every tensor with a model but uses our attention.

    Which attention a transformers model runs stands in its config, which all its modules share, so
    switching it there would change the model for everybody else who holds it. Each module gets a
    mirror instead: a shallow copy that shares the dictionaries of parameters, buffers and hooks,
    with its own config and its own children, in evaluation mode. No weight is copied. Plain linear
    layers are mirrored by `native.linear.Linear`, which asks a kernel of ours first.

    What is edited elsewhere (modules that PEFT and quantization replace, add or take out;
    attributes, configs, classes) is taken over by `follow`, which every request calls before it
    reads the model. ``version`` counts these updates; ``check`` runs when classes were added or
    their code changed. With ``attention`` None the mirror runs the model's own.
    """

    def __init__(self, source: PreTrainedModel, *, attention: str | None = NAME) -> None:
        self.version = 0
        self._attention = attention
        self.check: Callable[[], None] | None = None
        self._source = source
        self.after_fork()
        in_children(self)
        self._mirrors: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}
        self._refusal: UnsupportedModelError | None = None
        self._seen = _Seen(source)
        self._build()
        self.model = cast(PreTrainedModel, self._mirrors[id(source)][1])

    def after_fork(self) -> None:
        """In the child, an update that a thread had begun is made again."""
        self._lock = threading.RLock()

    def follow(self) -> None:
        """Take over what changed in the model since the last call.

        Raises:
            UnsupportedModelError: what it became can't be split into windows.
        """
        if not self._seen.same():
            with self._lock:
                if not self._seen.same():
                    self._take_over()
        if self._refusal is not None:
            raise self._refusal

    def _take_over(self) -> None:
        before, seen = self._seen, _Seen(self._source)
        self._build()
        self.version += 1
        self._seen = seen
        known = self._refusal is None and self._seen.code_is_of(before)
        self._refusal = None
        if self.check is not None and not known:
            try:
                self.check()
            except UnsupportedModelError as error:
                self._refusal = error

    def _build(self) -> None:
        modules = list(self._source.modules())
        self._mirrors = {
            id(module): self._mirrors.get(id(module))
            or (module, cast(Any, type(module)).__new__(type(module)))
            for module in modules
        }
        mirrors = {place: mirror for place, (_, mirror) in self._mirrors.items()}
        configs: dict[int, Any] = {}
        for module in modules:
            mirror = mirrors[id(module)]
            mirror.__class__ = class_of_view(module)
            made = {
                name: _rebind(value, mirrors, configs)
                for name, value in module.__dict__.items()
                # Compiled code has the original's attention in it.
                if name != "_compiled_call_impl"
            }
            if _rewrites_its_tables(module):
                # Both views remember how far their tables have grown, so each needs its own.
                made["_buffers"] = dict(module._buffers)
            children = module._modules.items()
            made["_modules"] = {
                name: None if child is None else mirrors[id(child)] for name, child in children
            }
            made["training"] = False
            # Another thread may be reading: no attribute is gone for a moment.
            mirror.__dict__.update(made)
            for name in mirror.__dict__.keys() - made.keys():
                del mirror.__dict__[name]
        if self._attention is None:
            return
        # The setter also reaches the configs of sub-models, such as a text decoder's.
        root = cast(PreTrainedModel, mirrors[id(self._source)])
        root.config._attn_implementation = self._attention
        for config in configs.values():
            if isinstance(config, PreTrainedConfig):
                config._attn_implementation = self._attention


class _Seen:
    """A snapshot of what a model is made of, without its tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Values are stored as they are: one that is edited in place is the mirror's as well.
        self._modules = [
            (module, type(module), _attributes(module), dict(module._modules))
            for module in model.modules()
        ]
        kinds = {kind for _, kind, _, _ in self._modules}
        everywhere = {base for kind in kinds for base in kind.__mro__ if base is not object}
        self._classes = [(kind, dict(kind.__dict__)) for kind in everywhere]
        configs: dict[int, PreTrainedConfig] = {}
        for module, *_ in self._modules:
            _collect(module.__dict__.get("config"), configs)
        self._configs = [(config, _copied(config.__dict__)) for config in configs.values()]

    def same(self) -> bool:
        """Whether the model is still made of the same."""
        try:
            return (
                all(
                    type(module) is kind
                    and module._modules == children
                    and (
                        module.__dict__ == attributes
                        or (type(attributes) is _Few and _attributes(module) == attributes)
                    )
                    for module, kind, attributes, children in self._modules
                )
                and all(kind.__dict__ == known for kind, known in self._classes)
                and all(config.__dict__ == known for config, known in self._configs)
            )
        except (RuntimeError, ValueError, TypeError):
            # Comparing changed tensors or arrays gives no single truth value.
            return False

    def code_is_of(self, other: _Seen) -> bool:
        """Whether all code that runs here ran there too."""
        known = dict(other._classes)
        if any(known.get(kind) != code for kind, code in self._classes):
            return False
        patched = [
            {id(module): attributes.get("forward") for module, _, attributes, _ in seen._modules}
            for seen in (other, self)
        ]
        return all(patched[0].get(place) is own for place, own in patched[1].items() if own)


class _Few(dict[str, Any]):
    """Some attributes of a module whose others change as it is used."""


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """What an edit of the module would change: all attributes, where using it changes none."""
    few: tuple[str, ...]
    if isinstance(module, PreTrainedModel):
        few = ("config", "forward")
    elif _rewrites_its_tables(module):
        few = ("config", "forward", "rope_type")
    else:
        return dict(module.__dict__)
    return _Few({name: module.__dict__.get(name) for name in few})


def _collect(config: Any, found: dict[int, PreTrainedConfig]) -> None:
    """Add a config and those in it."""
    if isinstance(config, PreTrainedConfig) and id(config) not in found:
        found[id(config)] = config
        for value in config.__dict__.values():
            _collect(value, found)


def _copied(value: Any) -> Any:
    """Plain containers copied deeply, everything else as it is."""
    if type(value) is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copied(entry) for entry in value)
    return value


def _rewrites_its_tables(module: torch.nn.Module) -> bool:
    """Whether a rotary embedding replaces its buffers as prompts grow."""
    kinds = getattr(module, "rope_type", None)
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return bool(kinds & {"dynamic", "longrope"})


def _rebind(value: Any, mirrors: dict[int, torch.nn.Module], configs: dict[int, Any]) -> Any:
    """Point what refers to a module or config of the original at its mirror."""
    if isinstance(value, torch.nn.Module):
        return mirrors.get(id(value), value)
    if isinstance(value, PreTrainedConfig):
        return copy.deepcopy(value, configs)
    if isinstance(value, types.MethodType) and id(value.__self__) in mirrors:
        return types.MethodType(value.__func__, mirrors[id(value.__self__)])
    if isinstance(value, functools.partial):
        # accelerate wraps a dispatched module's forward like this.
        arguments = [_rebind(argument, mirrors, configs) for argument in value.args]
        bound = functools.partial(value.func, *arguments, **value.keywords)
        for name, attribute in value.__dict__.items():
            setattr(bound, name, _rebind(attribute, mirrors, configs))
        return bound
    return value
