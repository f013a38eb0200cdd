"""One float64 forward of all tokens of a call in one row, whose attention a reference spells out.

Nothing here comes from the engine. The model is copied to float64, and its attention function
replaced (by registration, under a name of these tests) with what the reference gives.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "parity_float64"


class Row(Protocol):
    """All tokens of one call in one row: ids and positions, each (tokens,) int64."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def rows(self) -> Tensor:
        """(tokens,) bool: the rows of the query."""
        ...

    @property
    def context(self) -> Tensor:
        """(tokens,) bool: keys of the windows that the query reads."""
        ...

    def visible(self, reach: int | None) -> Tensor:
        """(tokens, tokens) bool: which key each row sees in a layer of this reach."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """What the attention of one layer is given.

    Attributes:
        index: of the layer.
        query: (1, heads, tokens, dim).
        key: (1, key-value heads, tokens, dim).
        value: likewise.
        seen: (tokens, tokens) bool, which key each row sees.
        reach: of a sliding layer, None for full attention.
        factor: that the model multiplies its logits with.
        softcap: to which the logits are capped, or None.
        sinks: (heads,) logits of the sinks, or None.
    """

    index: int
    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    reach: int | None
    factor: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def keys(self) -> Tensor:
        """(1, heads, tokens, dim) float64."""
        return self._of_each_head(self.key)

    @property
    def values(self) -> Tensor:
        """(1, heads, tokens, dim) float64."""
        return self._of_each_head(self.value)

    @property
    def logits(self) -> Tensor:
        """(1, heads, tokens, tokens) float64, of all keys, seen or not."""
        logits = self.query.double() @ self.keys.mT * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _of_each_head(self, states: Tensor) -> Tensor:
        groups = self.query.shape[1] // states.shape[1]
        return states.double().repeat_interleave(groups, dim=1)


Mix = Callable[[Layer], Tensor]
"""(1, heads, tokens, dim) output of the attention."""


@dataclass(frozen=True, slots=True)
class _Call:
    row: Row
    sliding: Sequence[int | None]
    mix: Mix


_call: ContextVar[_Call] = ContextVar("parity_float64_call")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    call = _call.get()
    index = cast(int, module.layer_idx)
    reach = call.sliding[index]
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = call.row.visible(reach)
    output = call.mix(Layer(index, query, key, value, seen, reach, factor, softcap, s_aux))
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
_twins: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, PreTrainedModel]]
_twins = weakref.WeakKeyDictionary()


def twin(model: PreTrainedModel, implementation: str = NAME) -> PreTrainedModel:
    """A float64 copy of `model` with another attention; `model` is left alone."""
    twins = _twins.setdefault(model, {})
    if implementation not in twins:
        double = copy.deepcopy(model).double()
        double.set_attn_implementation(implementation)
        # The fused experts know no float64.
        double.set_experts_implementation("eager")
        twins[implementation] = double
    return twins[implementation]


@contextmanager
def _calling(call: _Call) -> Iterator[None]:
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


@torch.no_grad()
def forward(model: PreTrainedModel, sliding: Sequence[int | None], row: Row, mix: Mix) -> Tensor:
    """(rows of the query, vocab) fp32 logits.

    Args:
        model: left alone.
        sliding: reach of each layer, None for full attention.
        row: the tokens.
        mix: the attention of each layer.
    """
    with _calling(_Call(row, sliding, mix)):
        output = twin(model)(
            input_ids=row.ids[None], position_ids=row.positions[None], use_cache=False
        )
    return output.logits[0, row.rows].float()
