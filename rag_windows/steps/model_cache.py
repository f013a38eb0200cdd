"""What a model's own cache holds of a text, as tensors, and caches that are made of them.

Windows share one attention; a row does not: it is an ordinary sequence of prefix, passage and
query. So whatever a model keeps of a text, a row can go on from it, and keys and values need not be
all of it. Whoever adds a kind of layer adds it to `_of_layer` and `_fill`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from rag_windows.attention.layers import CACHE, refusal
from rag_windows.kv import Members, Window
from rag_windows.steps.ensemble_cache import EnsembleCache

KINDS = (
    DynamicLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
)
"""Layers of caches that are taken apart here, beside those that hold nothing.

Sliding ones drop what no later token sees; here they hold every token, so that a window's own are
a part of them (transformers' masks count positions, not tokens).
"""

NAMES = CACHE, "past_key_values", "cache_params"
"""What models call their cache."""


class ModelCache:
    """How one model takes its cache, and what that holds.

    Attributes:
        config: the model's.
        layers: those of its layers that hold anything.
        continues: whether it takes several tokens at once behind a cache; some models take one.
        token_bytes: of what it holds of a token, by device; known once it was read.
        state_bytes: of all states behind a text, whatever its length; likewise.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self.continues = True
        self.token_bytes: dict[torch.device, int] = {}
        self.state_bytes = 0
        self._inputs = frozenset(inspect.signature(model.forward).parameters)
        known = [name for name in NAMES if name in self._inputs]
        if not known:
            raise refusal(
                self.config.model_type,
                "it takes what it keeps of a text as an argument of its own, not as a cache of "
                "transformers",
            )
        self._argument = known[0]
        kinds = [type(layer) for layer in self.fresh().layers]
        self.layers = frozenset(i for i, kind in enumerate(kinds) if not _holds_nothing(kind))
        strange = {kinds[index].__name__ for index in self.layers} - {one.__name__ for one in KINDS}
        if strange:
            named = ", ".join(sorted(strange))
            reason = f"its cache has layers of the kind {named}"
            raise refusal(self.config.model_type, reason)

    def fresh(self) -> DynamicCache:
        """An empty cache."""
        cache = DynamicCache(config=self.config)
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                cache.layers[index] = DynamicLayer()
            elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
                states = layer.number_of_states
                cache.layers[index] = LinearAttentionAndFullAttentionLayer(states)
        return cache

    def windows(
        self, cache: DynamicCache, ids: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[Window]:
        """What a cache holds of the last tokens of its rows, as views.

        Args:
            cache: behind as many texts, which end with these tokens.
            ids: of each row, as many.
            starts: position of the first of them.

        Raises:
            UnsupportedModelError: it does not hold all that the model keeps.
        """
        length = len(ids[0])
        keys: list[tuple[int, torch.Tensor]] = []
        values: list[tuple[int, torch.Tensor]] = []
        states: list[tuple[int, torch.Tensor]] = []
        for index, layer in enumerate(cache.layers):
            tokens, own = _of_layer(layer)
            if index in self.layers and not tokens and not own:
                reason = "some of its layers keep what they need outside of the cache"
                raise refusal(self.config.model_type, reason)
            keys += [(index, key[:, :, key.shape[2] - length :]) for key, _ in tokens]
            values += [(index, value[:, :, value.shape[2] - length :]) for _, value in tokens]
            states += [(index, one) for one in own]
        self._measure([one for _, one in (*keys, *values)], [one for _, one in states])
        each = [*keys, *values, *states]
        layers = tuple(index for index, _ in each)
        first, last = len(keys), len(keys) + len(values)

        def window(row: int) -> Window:
            tensors = [tensor[row] for _, tensor in each]
            return Window(
                tuple(ids[row]),
                starts[row],
                tuple(tensors[:first]),
                tuple(tensors[first:last]),
                tuple(tensors[last:]),
                layers,
            )

        return [window(row) for row in range(len(ids))]

    def _measure(self, tokens: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> None:
        self.state_bytes = sum(one[0].nbytes for one in states)
        sizes = {one.device: 0 for one in (*states, *tokens)}
        for one in tokens:
            sizes[one.device] += one[0, :, 0].nbytes
        self.token_bytes = sizes

    def behind(self, rows: Sequence[Sequence[Window]]) -> DynamicCache:
        """A cache of rows that stand behind these windows, one behind the other; padded in front.

        A row without any is empty.
        """
        cache = self.fresh()
        lengths = [sum(len(one.ids) for one in row) for row in rows]
        like = next((one for row in rows for one in row), None)
        if like is None:
            return cache
        longest = max(lengths)
        for index, layer in enumerate(cache.layers):
            places = [place for place, own in enumerate(like.layers) if own == index]
            found = [_stacked(rows, place, like, longest) for place in places]
            _fill(layer, found)
        return cache

    def feed(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        cache: DynamicCache,
        lengths: Sequence[int],
        positions: torch.Tensor,
        last: int,
    ) -> torch.Tensor:
        """Let rows go on from a cache, which takes in their tokens.

        Args:
            ids: (rows, tokens) int64.
            lengths: tokens of each row that the cache holds, apart from padding.
            positions: (rows, tokens) int64.
            last: of how many last tokens logits are wanted.

        Returns:
            Logits (rows, last, vocabulary) in the model's dtype.
        """
        tokens, longest = ids.shape[1], max(lengths)
        pieces = [ids] if self.continues or not longest else [*ids.split(1, dim=1)]
        has_tokens = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
        found: list[torch.Tensor] = []
        done = 0
        for piece in pieces:
            end = done + piece.shape[1]
            inputs: dict[str, Any] = {self._argument: cache}
            if "position_ids" in self._inputs:
                inputs["position_ids"] = positions[:, done:end]
            if has_tokens and len({*lengths}) > 1:
                # States have no padding: a row's own tokens alone went into them.
                places = torch.arange(longest + end, device=ids.device)
                padding = longest - torch.tensor([*lengths], device=ids.device)
                inputs["attention_mask"] = (places >= padding.unsqueeze(1)).to(torch.int64)
            wanted = max(1, min(piece.shape[1], last - (tokens - end)))
            if "logits_to_keep" in self._inputs:
                inputs["logits_to_keep"] = wanted
            output = model(piece, use_cache=True, **inputs)
            found.append(torch.as_tensor(output.logits)[:, -wanted:])
            done = end
        return torch.cat(found, dim=1)[:, -last:]


def _holds_nothing(kind: type) -> bool:
    return not issubclass(kind, CacheLayerMixin | LinearAttentionLayer)


def _of_layer(layer: Any) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """What a layer holds of each token, and of all tokens; of what it does not use, empty tensors.

    Returns:
        Pairs of (rows, heads, tokens, width), of which a second one is an indexer's keys and
        nothing; and states (rows, ...). Neither, where no pass has used the layer.
    """
    tokens: list[tuple[torch.Tensor, torch.Tensor]] = []
    states: list[torch.Tensor] = []
    unused = False
    if isinstance(layer, DynamicLayer):
        keys, values = cast(torch.Tensor, layer.keys), cast(torch.Tensor, layer.values)
        unused = not layer.is_initialized
        if not unused:
            tokens.append((keys, values))
            if isinstance(layer, DynamicIndexedLayer):
                own = layer.indexer_keys
                indexed = keys[:, :1, :, :0] if own is None else own.unsqueeze(1)
                tokens.append((indexed, keys[:, :1, :, :0]))
    if isinstance(layer, LinearAttentionLayer):
        unused = unused or not all(layer.has_previous_state.values())
        used = [one for one in _states_of(layer) if one is not None]
        for one in _states_of(layer) if used else ():
            states.append(used[0].new_empty(len(used[0]), 0) if one is None else one)
    return ([], []) if unused else (tokens, states)


def _states_of(layer: LinearAttentionLayer) -> Iterator[torch.Tensor | None]:
    for index in range(layer.number_of_states):
        yield layer.conv_states[index]
        yield layer.recurrent_states[index]


def _fill(layer: Any, found: Sequence[torch.Tensor]) -> None:
    """Fill an empty layer with what `_of_layer` finds in one: keys, values, states."""
    left = [*found]
    if isinstance(layer, DynamicLayer):
        pairs = 2 if isinstance(layer, DynamicIndexedLayer) else 1
        keys, values, left = left[:pairs], left[pairs : 2 * pairs], left[2 * pairs :]
        # Not by an update, which would copy all of it once more.
        layer.lazy_initialization(keys[0], values[0])
        layer.keys, layer.values = keys[0], values[0]
        if isinstance(layer, DynamicIndexedLayer) and keys[1].shape[-1]:
            layer.update_indexer(keys[1][:, 0])
    if isinstance(layer, LinearAttentionLayer):
        for index in range(layer.number_of_states):
            convolved, recurrent = left[2 * index : 2 * index + 2]
            if convolved.numel():
                layer.lazy_initialization(conv_states=convolved, state_idx=index)
                layer.conv_states[index] = convolved
            if recurrent.numel():
                layer.lazy_initialization(recurrent_states=recurrent[:0], state_idx=index)
                layer.recurrent_states[index] = recurrent
            layer.has_previous_state[index] = True


def _stacked(
    rows: Sequence[Sequence[Window]], place: int, like: Window, longest: int
) -> torch.Tensor:
    """One tensor of all rows: tokens padded in front, states of the last window or none yet."""
    one = like.tensors[place]
    if place >= 2 * len(like.keys):
        return torch.stack(
            [row[-1].tensors[place] if row else one.new_zeros(one.shape) for row in rows]
        )
    whole = one.new_zeros(len(rows), one.shape[0], longest, one.shape[2])
    for index, row in enumerate(rows):
        end = longest
        for window in reversed(row):
            part = window.tensors[place]
            whole[index, :, end - part.shape[1] : end] = part
            end -= part.shape[1]
    return whole


def joined_windows(windows: Sequence[Window]) -> Window:
    """Windows of which each was encoded behind those before it, as one."""
    first, last = windows[0], windows[-1]
    if first is last:
        return first
    ids = tuple(token for one in windows for token in one.ids)
    pairs = zip(*(one.tensors[: 2 * len(one.keys)] for one in windows), strict=True)
    tokens = [torch.cat(parts, dim=1) for parts in pairs]
    return replace(last, ids=ids, start=first.start).holding([*tokens, *last.states])


class RowsCache(EnsembleCache):
    """Of rows that go on from the model's own cache, each behind prefix and window.

    To transformers' ``generate`` it holds prefix and query, as any other; what the model reads is
    inside of it. A query that is said to begin at ``query_start`` does so where its row ends.
    """

    def __init__(
        self,
        form: ModelCache,
        members: Members,
        prefix: Window | None,
        queries: int,
        query_start: int,
    ) -> None:
        super().__init__(members.per_query)
        head = [] if prefix is None else [prefix]
        rows = [[*head, window] for window in members.windows] + [head] * members.prior
        self._form, self._queries = form, queries
        self._own = form.behind(rows * queries)
        self._lengths = [sum(len(one.ids) for one in row) for row in rows]
        self._query_start = query_start
        self._taken = sum(len(one.ids) for one in head)
        self._fed = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the prefix and of the query."""
        return self._taken + self._fed

    @property
    def is_linear(self) -> list[bool]:
        """Of one layer that counts tokens: without one, ``generate`` would feed the prefix."""
        return [False]

    def read(
        self, model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, last: int
    ) -> torch.Tensor:
        """See `EnsembleCache.read`; each row goes on where it ends."""
        own = torch.tensor(self._lengths, device=positions.device) - self._query_start
        places = (positions.unsqueeze(1) + own.view(1, -1, 1)).flatten(0, 1)
        lengths = [length + self._fed for length in self._lengths] * self._queries
        whole = ids.repeat_interleave(self.per_query, dim=0)
        logits = self._form.feed(model, whole, self._own, lengths, places, last)
        self._fed += ids.shape[1]
        return logits

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `EnsembleCache.batch_repeat_interleave`."""
        self.batch_select_indices(torch.arange(self._queries).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See `EnsembleCache.batch_select_indices`."""
        # Of the layers' methods only this one is there for each kind; it takes any rows.
        self._own.reorder_cache(self._rows(indices))
        self._queries = len(indices)
        self._remember(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """See `EnsembleCache.reorder_cache`."""
        self.batch_select_indices(beam_idx)
