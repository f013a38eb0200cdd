"""The rows of a batch: how each gets its tokens, and what they read together in a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, Generic, TypeVar

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from rag_windows.attention.layout import Layout, of_stretches, of_window, texts
from rag_windows.attention.segments import (
    Queries,
    Reading,
    Role,
    Rows,
    Segment,
    Segments,
    SegmentWeights,
    Weights,
    segment_weights,
)
from rag_windows.errors import GenerationError, InputError
from rag_windows.generate import Decoder, with_config
from rag_windows.kv import Window, Windows
from rag_windows.loading import input_device
from rag_windows.methods import query_bias
from rag_windows.prefill import EncodedContext
from rag_windows.sampling import refuse_model_inputs, seeded

OPTIONS = {
    *vars(GenerationConfig()),
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "tokenizer",
}
"""Options of ``generate`` that a batch knows; a question with others is answered by itself."""

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "assistant_early_exit": (None, False),
    "cache_implementation": (None, False, "hybrid"),
    "constraints": (None,),
    "dola_layers": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_logits": (None, False),
    "output_scores": (None, False),
    "penalty_alpha": (None, 0),
    "prompt_lookup_num_tokens": (None,),
    "stop_strings": (None,),
    "token_healing": (None, False),
    "use_mtp": (None, False),
    "watermarking_config": (None,),
}
"""Options that a row of a batch can have only with these values."""


def served(decoder: Decoder, options: Mapping[str, Any]) -> bool:
    """Whether a row of a batch can do what these options ask for."""
    if not OPTIONS.issuperset(name for name, value in options.items() if value is not None):
        return False
    return all(decoder.option(options, name) in values for name, values in PLAIN.items())


def _prepared(model: Any, input_ids: torch.Tensor, **made: Any) -> dict[str, Any]:
    """What ``generate`` makes of its arguments before its loop begins."""
    return made


class FedRow:
    """What one row of a forward pass is fed, and what it reads.

    Attributes:
        prefix: None where the row's own tokens begin with it, or where it is empty.
        windows: what it reads, each window once; None where there are none.
        fed: tokens that the next forward pass takes: at first the whole query.
        position: of the first of those.
        weights: attention weights of each span, of the prefix and of the row's own tokens, summed
            over what was recorded; only their shares mean something.
    """

    cited = False

    def __init__(self, context: EncodedContext, query_ids: Sequence[int]) -> None:
        if not query_ids:
            raise InputError("The query has no tokens. Give at least one.")
        method, windowed = context.method, isinstance(context.windows, Windows)
        self.prefix: Window | None = context.prefix if windowed else None
        self.windows = context.windows if isinstance(context.windows, Windows) else None
        # Without windows nothing else holds the prefix, so it begins the row's own KV cache.
        self.fed = list(query_ids) if windowed else [*context.prefix_ids, *query_ids]
        self.position = context.query_start if windowed else 0
        self.temperature, self.slope, self.shift = method.temperature, method.slope, method.shift
        self.query_bias = query_bias(method, len(context.each)) if windowed else 0.0
        spans = 0 if self.windows is None else len(self.windows.spans)
        self.weights = [0.0] * (spans + 2)


class Row(FedRow):
    """One row of the batch.

    ``generate`` itself prepares its processors and criteria, so that defaults, order and refusals
    are its own; then it hands over to its caller's loop. ``options`` are its options, with
    ``max_new_tokens``, and ``criteria`` further stopping criteria. A seed gives the row a generator
    of its own; cited rows record attention weights.

    Attributes:
        last: position behind the last token that it may get.
        greedy: whether the largest logit is its next token.
        sequence: (1, tokens) int64: the prompt and what was generated.
        error: what ended it, if something did.
    """

    def __init__(
        self,
        decoder: Decoder,
        context: EncodedContext,
        query_ids: Sequence[int],
        options: Mapping[str, Any],
        *,
        criteria: Sequence[Any] = (),
        seed: int | None = None,
        cited: bool = False,
        streamer: BaseStreamer | None = None,
    ) -> None:
        super().__init__(context, query_ids)
        refuse_model_inputs(options)
        decoder.follow()
        windowed = self.windows is not None
        prompt = [*context.prefix_ids, *query_ids]
        self.last = self.position + len(self.fed) + options["max_new_tokens"]
        self.cited = cited and windowed
        self.error: BaseException | None = None
        self.ended = False
        self._span_groups = None if self.windows is None else self.windows.span_groups
        model = decoder.runner.model if windowed else decoder.model
        device = input_device(model)
        arguments = with_config(decoder.arguments(options, len(prompt), criteria))
        self.sequence = self._buffer = torch.tensor([prompt], dtype=torch.int64, device=device)
        made: Any = model.generate(self.sequence, custom_generate=_prepared, **arguments)
        self._processors, self._criteria = made["logits_processor"], made["stopping_criteria"]
        mode = made["generation_config"].get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise GenerationError(f"A batch can't decode by {mode.value}. Ask with generate().")
        self._sampling = bool(made["generation_config"].do_sample)
        self.greedy = not self._sampling and not self._processors
        self._ends = decoder.end_tokens(arguments)
        self._scope = seeded(seed, device)
        self._streamer = streamer
        self._prompt = len(prompt)
        if streamer is not None:
            streamer.put(self.sequence.cpu())

    def leave(self) -> None:
        """Read nothing any more."""
        self.prefix = self.windows = None

    def sample(self, logits: torch.Tensor) -> int:
        """The next token, from logits (vocabulary,) fp32, which stay as they are."""
        with self._scope:
            scores = self._processors(self.sequence, logits.unsqueeze(0).clone())
            if not self._sampling:
                return int(scores.argmax(dim=-1))
            chances = torch.nn.functional.softmax(scores, dim=-1)
            return int(torch.multinomial(chances, num_samples=1))

    def take(self, token: int) -> None:
        """Append a token, which the next pass is fed; the criteria say whether it was the last."""
        place = self.sequence.shape[1]
        if place == self._buffer.shape[1]:
            # Doubled in advance, so that a token is one write.
            self._buffer = torch.cat([self.sequence, torch.empty_like(self.sequence)], dim=1)
        self._buffer[0, place] = token
        self.sequence = self._buffer[:, : place + 1]
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        # No scores are stored, as without output_scores.
        self.ended = bool(self._criteria(self.sequence, None).all())
        if self.ended and self._streamer is not None:
            self._streamer.end()
        self.position += len(self.fed)
        self.fed = [token]

    def tokens(self) -> list[int]:
        """The generated tokens, up to the first that ends a text."""
        ids: list[int] = self.sequence[0, self._prompt :].tolist()
        end = next((i + 1 for i, token in enumerate(ids) if token in self._ends), len(ids))
        return ids[:end]

    def attention(self) -> list[float] | None:
        """Attention of the citation groups, the prefix and the row's own tokens, summing to one.

        None if it was not recorded.
        """
        if not self.cited or self._span_groups is None:
            return None
        *spans, prefix, query = self.weights
        weights = torch.tensor(spans, dtype=torch.float32)
        groups: list[float] = (weights @ self._span_groups).tolist()
        whole = [*groups, prefix, query]
        total = sum(whole)
        return [weight / total for weight in whole]


FIRST_CAPACITY = 64
"""Tokens that the KV caches of a batch hold before they grow for the first time."""


class RowCaches:
    """The KV caches of a batch's rows, with spare capacity, so that a token is one write.

    Row ``i`` of a batch is row ``i`` of the tensors, by layer (rows, kv heads, capacity, head dim
    or value dim); it has ``lengths[i]`` tokens. Not for several threads at once.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row != last:
            for buffer in (*self.keys.values(), *self.values.values()):
                buffer[row, :, :length] = buffer[last, :, :length]
            self.lengths[row] = length
        self.set_lengths(self.lengths[:-1])

    def grow(self, tokens: Sequence[int]) -> None:
        """Count the tokens of the pass that begins, by row; rows that are new stand behind."""
        self.lengths += [0] * (len(tokens) - len(self.lengths))
        self.lengths = [length + n for length, n in zip(self.lengths, tokens, strict=True)]

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Let each row have so many of its tokens, and forget the rows behind them."""
        self.lengths = list(lengths)
        if not self.lengths:
            self.keys.clear()
            self.values.clear()

    def buffers(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, shaped like the given ones, for all counted tokens."""
        held = self.keys.get(layer)
        rows, tokens = len(self.lengths), max(*self.lengths, FIRST_CAPACITY)
        if held is None or held.shape[0] < rows or held.shape[2] < tokens:
            if held is not None:
                rows = held.shape[0] if held.shape[0] >= rows else max(rows, 2 * held.shape[0])
                tokens = held.shape[2] if held.shape[2] >= tokens else 2 * tokens
            for buffers, like in ((self.keys, key), (self.values, value)):
                # Zeros, not what memory happens to hold: masked weights times NaN would be NaN.
                buffer = like.new_zeros(rows, like.shape[0], tokens, like.shape[2])
                if layer in buffers:
                    before = buffers[layer]
                    buffer[: before.shape[0], :, : before.shape[2]] = before
                buffers[layer] = buffer
        return self.keys[layer], self.values[layer]


AnyRow = TypeVar("AnyRow", bound=FedRow)


class Plan(Generic[AnyRow]):
    """Which rows take part in forward passes, and what they read; it holds until rows come or go.

    The first ``old`` rows have a KV cache already, with one fed token each. ``newest`` (rows,)
    int64, on the CPU, is the place of each row's last token; ``encoded`` are the segments of
    windows and prefixes.
    """

    def __init__(self, rows: Sequence[AnyRow], old: int) -> None:
        self.rows = list(rows)
        self.old = old
        self.lengths = [len(row.fed) for row in rows]
        ends = list(accumulate(self.lengths, initial=0))
        self.newest = torch.tensor(ends[1:]) - 1
        self._tokens = ends[-1]
        self._owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(self.lengths))
        places = [torch.arange(start, end) for start, end in pairwise(ends)]
        self._places = dict(zip(rows, places, strict=True))
        self.slope = self._of_tokens([row.slope for row in rows], 1.0)
        self.shift = self._of_tokens([row.shift for row in rows], 0.0)
        self.query_bias = self._of_tokens([row.query_bias for row in rows], 0.0)
        self.cited = any(row.cited for row in rows)
        # What the attention weights that predict an answer's next token are of: for each segment,
        # places among its results; and by role, row and entry of `Row.weights`.
        self._wanted: list[torch.Tensor] = []
        self._cited: dict[Role, list[tuple[AnyRow, int]]] = {
            "context": [],
            "prefix": [],
            "query": [(row, -1) for row in rows if row.cited],
        }
        segments = [*self._windows(), *self._prefixes()]
        self._wanted.append(self.newest[[row.cited for row in rows]])
        self.encoded = [Segments(segments, self._tokens, static=True)] if segments else []
        self._recorded: dict[Role, torch.Tensor] = {}

    def of_cited(self, layers: Sequence[Weights]) -> list[SegmentWeights]:
        """The attention weights of the tokens that predict an answer's next one."""
        segments = segment_weights(layers)
        query = [one.shares for one in segments if one.role == "query"]
        # The segments of the rows' own tokens give a result for each token, in order.
        own = SegmentWeights("query", torch.cat(query, dim=1))
        whole = [*segments[: len(segments) - len(query)], own]
        return [
            one if len(places) == one.shares.shape[1] else one.at(places)
            for one, places in zip(whole, self._wanted, strict=True)
        ]

    def keep(self, recorded: Sequence[Sequence[SegmentWeights]]) -> None:
        """Add a pass's attention weights, as `of_cited` gives them, once it is done."""
        for segments in recorded:
            by_role: dict[Role, list[torch.Tensor]] = {}
            for one in segments:
                by_role.setdefault(one.role, []).append(one.summed().flatten())
            for role, weights in by_role.items():
                sums = torch.cat(weights)
                if role in self._recorded:
                    sums = sums.to(self._recorded[role].device) + self._recorded[role]
                self._recorded[role] = sums

    def flush(self) -> None:
        """Hand the attention weights to the rows, once."""
        recorded, self._recorded = self._recorded, {}
        for role, sums in recorded.items():
            for (row, of), weight in zip(self._cited[role], sums.tolist(), strict=True):
                row.weights[of] += weight

    def _of_tokens(self, numbers: Sequence[float], usual: float) -> float | torch.Tensor:
        """A number for all tokens, or (tokens, 1) fp32."""
        if all(number == usual for number in numbers):
            return usual
        if len(set(numbers)) == 1:
            return numbers[0]
        return torch.tensor(numbers, dtype=torch.float32)[self._owners].unsqueeze(-1)

    def _prefixes(self) -> list[Segment]:
        readers: dict[int, tuple[Window, list[AnyRow]]] = {}
        for row in self.rows:
            if row.prefix is not None:
                readers.setdefault(id(row.prefix), (row.prefix, []))[1].append(row)
        made: list[Segment] = []
        for window, rows in readers.values():
            tokens, cited = self._readers(rows)
            self._wanted.append(cited)
            self._cited["prefix"] += [(row, -2) for row in rows if row.cited]
            made.append(Segment("prefix", window.start, window.end - 1, tokens))
            made[-1].layers = of_window(window)
        return made

    def _windows(self) -> list[Segment]:
        """Windows as segments: one for all that have the same readers."""
        readers: dict[tuple[int, float], list[tuple[AnyRow, int]]] = {}
        stretches: dict[int, list[tuple[Window, slice]]] = {}
        for row in self.rows:
            entry = 0
            for _, run in groupby(row.windows.stretches() if row.windows else (), _window):
                spans = [*run]
                whose = id(spans[0][0])
                stretches[whose] = spans
                readers.setdefault((whose, row.temperature), []).append((row, entry))
                entry += len(spans)
        together: dict[tuple[tuple[AnyRow, ...], float], list[tuple[int, list[int]]]] = {}
        for (whose, temperature), found in readers.items():
            alike = tuple(row for row, _ in found), temperature
            together.setdefault(alike, []).append((whose, [entry for _, entry in found]))
        made: list[Segment] = []
        for (rows, temperature), group in together.items():
            parts: list[tuple[Window, slice]] = []
            for whose, entries in group:
                for number, part in enumerate(stretches[whose]):
                    parts.append(part)
                    self._cited["context"] += [
                        (row, entry + number)
                        for row, entry in zip(rows, entries, strict=True)
                        if row.cited
                    ]
            tokens, cited = self._readers(rows)
            self._wanted.append(cited)
            starts = [window.start + (place.start or 0) for window, place in parts]
            last = max(window.end for window, _ in parts) - 1
            segment = Segment("context", min(starts), last, tokens, starts=starts)
            segment.temperature, segment.layers = temperature, of_stretches(parts)
            made.append(segment)
        return made

    def _readers(self, rows: Sequence[AnyRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of rows; and places among these of the newest ones of cited rows."""
        tokens = torch.cat([self._places[row] for row in rows])
        ends = torch.tensor([len(self._places[row]) for row in rows]).cumsum(0) - 1
        return tokens, ends[[row.cited for row in rows]]


def _window(stretch: tuple[Window, slice]) -> int:
    return id(stretch[0])


class BatchLayout(Layout):
    """One forward pass over the tokens of all rows, one behind the other in one batch row.

    ``caches`` count this pass's tokens already; ``positions`` (tokens,) int64 are on the CPU.
    """

    def __init__(
        self,
        sliding_windows: tuple[int | None, ...],
        plan: Plan[Any],
        caches: RowCaches,
        positions: torch.Tensor,
    ) -> None:
        self.sliding_windows = sliding_windows
        self._plan = plan
        self._caches = caches
        self._layers: list[Weights] = []
        self._cited: list[list[SegmentWeights]] = []
        self._where: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        tokens, old = len(positions), plan.old
        own: list[Segment] = []
        if old:
            lengths = torch.tensor(caches.lengths[:old])
            starts = positions[:old] - lengths + 1
            self._old = Segment(
                "query",
                int(starts.min()),
                int(positions[:old].max()),
                tokens=torch.arange(old),
                positions=starts.unsqueeze(-1) + torch.arange(int(lengths.max())),
                seen=lengths,
            )
            own.append(self._old)
        self._new = texts(plan.lengths[old:], positions, old)
        own += [one.segment for one in self._new]
        made = [*plan.encoded, Segments(own, tokens)]
        self._reading = Reading(Rows(positions), made, plan.slope, plan.shift, plan.query_bias)

    @property
    def weighs(self) -> bool:
        """Whether a row of the batch is cited."""
        return self._plan.cited

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """Write the fed tokens into their rows' KV caches, and say what they read."""
        old, device = self._plan.old, key.device
        keys, values = self._caches.buffers(layer, key[0], value[0])
        if old:
            if device not in self._where:
                ends = torch.tensor(self._caches.lengths[:old], device=device) - 1
                self._where[device] = torch.arange(old, device=device), ends
            index, ends = self._where[device]
            keys[index, :, ends] = key[0, :, :old].transpose(0, 1)
            values[index, :, ends] = value[0, :, :old].transpose(0, 1)
            longest = max(self._caches.lengths[:old])
            self._old.layers = {layer: [(keys[:old, :, :longest], values[:old, :, :longest])]}
        row = old
        for one in self._new:
            place = slice(row, row + one.groups)
            part = one.take(layer, key, value)
            keys[place, :, : one.length], values[place, :, : one.length] = part
            row += one.groups
        return self._reading

    def record(self, weights: Weights, asked: Queries) -> None:
        """See `Layout.record`."""
        if len(self._plan.newest) == len(self._reading.rows.positions):
            self._layers.append(weights)
        else:
            # Of a pass of many tokens, only the weights of a few are stored.
            self._cited.append(self._plan.of_cited([weights]))

    @property
    def recorded(self) -> list[list[SegmentWeights]]:
        """The attention weights of the pass, as `Plan.of_cited` gives them."""
        return self._cited + ([self._plan.of_cited(self._layers)] if self._layers else [])
