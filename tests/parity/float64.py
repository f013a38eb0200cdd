"""One float64 forward of all tokens of a call in one row, whose attention a reference spells out.

Nothing here comes from the engine. The model is copied to float64, and its attention function
replaced (by registration, under a name of these tests) with what the reference gives.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

NAME = "parity_float64"


Row = Any
"""All tokens of one call in one row, such as `dense.Packed`: its `ids` and `positions`, which of
them are `rows` of the query and keys of the `context` (bool), and what is `visible` to whom."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What the attention of one layer is given.

    Query, key and value are (1, heads, tokens, dim), keys and values of the key-value heads. `seen`
    (tokens, tokens) says which key each row sees, `reach` is that of a sliding layer. The model
    multiplies its logits by `factor`, caps them to `softcap` and has `sinks` (heads,), or None.
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


_call: ContextVar[tuple[Row, Sequence[int | None], Mix]] = ContextVar("parity_float64_call")


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
    row, sliding, mix = _call.get()
    index = cast(int, module.layer_idx)
    reach = sliding[index]
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = row.visible(reach)
    output = mix(Layer(index, query, key, value, seen, reach, factor, softcap, s_aux))
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


@torch.no_grad()
def cached(model: PreTrainedModel, cache: Cache, ids: Sequence[int], **given: Any) -> Any:
    """The output of the model's own attention in float64, whose keys go into a cache."""
    double = twin(model, "eager")
    known = inspect.signature(double.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    return double(input_ids=torch.tensor([[*ids]]), use_cache=True, **{name: cache}, **given)


@torch.no_grad()
def forward(model: PreTrainedModel, sliding: Sequence[int | None], row: Row, mix: Mix) -> Tensor:
    """(rows of the query, vocab) fp32 logits, with an attention for each layer.

    `sliding` gives the reach of each layer, None for full attention.
    """
    token = _call.set((row, sliding, mix))
    try:
        output = twin(model)(
            input_ids=row.ids[None], position_ids=row.positions[None], use_cache=False
        )
    finally:
        _call.reset(token)
    return output.logits[0, row.rows].float()
