"""A view of a model with another forward pass, for transformers' generation to run on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from transformers import PreTrainedModel

_TWIN = "_rag_windows_twin"


def make_view(twin: PreTrainedModel, forward: Callable[..., Any]) -> PreTrainedModel:
    """A second view of a model.

    It is of a subclass of the model's class, shares all of its modules and has no state, so
    transformers' own ``generate`` runs on it with its loop, processors, criteria and streamers.

    Args:
        twin: the model.
        forward: a function of a module, called with the twin and the arguments of its forward pass.
    """
    plain: Any = type(twin)
    kind = _kind(plain, forward)
    view = kind.__new__(kind)
    view.__dict__.update(twin.__dict__)
    # What dispatches a model over devices stands here; the twin's own does so in every pass.
    view.__dict__.pop("forward", None)
    view.__dict__[_TWIN] = twin
    return cast(PreTrainedModel, view)


@cache
def _kind(kind: Any, forward: Callable[..., Any]) -> Any:
    """The subclass of a model's class whose forward pass is ours."""

    def seen(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return forward(self.__dict__[_TWIN], *args, **kwargs)

    # transformers asks it which inputs a model takes.
    seen.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]  # see PEP 362
    return type(kind)(kind.__name__, (kind,), {"forward": seen, "__module__": forward.__module__})
