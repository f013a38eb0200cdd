"""A second view of a model: same weights, our attention, the original untouched."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rag_windows.attention.hook import NAME


def make_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Build a module tree that shares every tensor with ``model`` but uses our attention.

    Which attention a transformers model runs stands in its config, which all its modules share.
    Switching it there would change the model for everybody else who holds it, also in other
    threads and after an exception. So each module gets a twin: a shallow copy that shares the
    very dictionaries of parameters, buffers and hooks (what moves or requantizes the original
    moves the twin), with its own config and its own children, in evaluation mode. No weight is
    copied; the cost is a few kilobytes a module.

    Args:
        model: any transformers model, dispatched or quantized or not.
    """
    twins = {id(module): _shell(module) for module in model.modules()}
    configs: dict[int, Any] = {}
    for module in model.modules():
        twin = twins[id(module)]
        for name, value in module.__dict__.items():
            twin.__dict__[name] = _rebind(value, twins, configs)
        if _rewrites_its_tables(module):
            # Both views remember how far their tables have grown, so each needs its own.
            twin.__dict__["_buffers"] = dict(module._buffers)
        children = module._modules.items()
        twin.__dict__["_modules"] = {
            name: None if child is None else twins[id(child)] for name, child in children
        }
        twin.__dict__["training"] = False
    twin = cast(PreTrainedModel, twins[id(model)])
    # The setter also reaches the configs of sub-models, such as a text decoder's.
    twin.config._attn_implementation = NAME
    for module in twin.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = NAME
    return twin


def _shell(module: torch.nn.Module) -> torch.nn.Module:
    return type(module).__new__(type(module))


def _rewrites_its_tables(module: torch.nn.Module) -> bool:
    """Whether a rotary embedding replaces its buffers as prompts grow."""
    kinds = getattr(module, "rope_type", None)
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return bool(kinds & {"dynamic", "longrope"})


def _rebind(value: Any, twins: dict[int, torch.nn.Module], configs: dict[int, Any]) -> Any:
    """Point what refers to a module or config of the original at its twin."""
    if isinstance(value, torch.nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, PreTrainedConfig):
        return copy.deepcopy(value, configs)
    if isinstance(value, types.MethodType) and id(value.__self__) in twins:
        return types.MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, functools.partial):
        # accelerate wraps a dispatched module's forward this way.
        arguments = [_rebind(argument, twins, configs) for argument in value.args]
        bound = functools.partial(value.func, *arguments, **value.keywords)
        for name, attribute in value.__dict__.items():
            setattr(bound, name, _rebind(attribute, twins, configs))
        return bound
    return value
