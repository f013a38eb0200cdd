"""Token-level generation: transformers' own loop over the KV cache, the windows beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from rag_windows.attention.layers import CACHE, check_tables, table_limit
from rag_windows.attention.layout import PromptLayout, use_layout
from rag_windows.attention.merge import Rescaling
from rag_windows.attention.weights import WeightRecorder
from rag_windows.errors import InputError
from rag_windows.kv import Members, Windows
from rag_windows.loading import input_device
from rag_windows.methods import ParallelEnsemble, QueryLikelihood, query_bias
from rag_windows.prefill import EncodedContext, ModelEncoder
from rag_windows.sampling import (
    ASSISTED,
    BATCHING,
    WITHOUT_ROWS,
    WITHOUT_WINDOWS,
    refuse,
    refuse_model_inputs,
    seeded,
)
from rag_windows.steps.ensemble import EnsembleLayout, make_view
from rag_windows.steps.likelihood import question_of, read_likeliest, rows_of
from rag_windows.steps.model_cache import ModelCache
from rag_windows.steps.query_attention import AttentionLayout, encode_again_for
from rag_windows.steps.removal import Removal, chances
from rag_windows.steps.selection import select


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one run of the loop gave.

    Attributes:
        sequences: generated token ids, one list a returned sequence, padding removed.
        raw: transformers' own output object.
        recorder: of attention weights, or None.
        rows: per returned sequence and token, which batch row predicted it.
    """

    sequences: list[list[int]]
    raw: Any
    recorder: WeightRecorder | None
    rows: list[list[int]]

    def weights(self, index: int) -> list[float] | None:
        """Attention of one sequence's tokens, on average: citation groups, prefix, query."""
        if self.recorder is None:
            return None
        weights: list[float] = self.recorder.average(*self._places(index)).tolist()
        return weights

    def token_weights(self, index: int) -> list[list[float]] | None:
        """The same of each token, in any unit that is one for all of them."""
        if self.recorder is None or not self.rows[index]:
            return None
        weights: list[list[float]] = self.recorder.of_tokens(*self._places(index)).tolist()
        return weights

    def _places(self, index: int) -> tuple[range, list[int]]:
        """Positions of the tokens that predicted a sequence, and their batch rows."""
        first = 0 if self.recorder is None else self.recorder.first_position
        return range(first, first + len(self.rows[index])), self.rows[index]


class Decoder:
    """Generates against encoded contexts; holds no state of a call.

    Args:
        model: the plain model, used where there are no windows.
        runner: of the same weights with our attention.
    """

    def __init__(self, model: PreTrainedModel, runner: ModelEncoder) -> None:
        self.model = model
        self.runner = runner
        self._mirror = runner.model
        self._derive()

    def follow(self) -> None:
        """Take over what was edited in the model since the last call; see `Encoder.follow`."""
        self.runner.follow()
        if self._version != self.runner.mirror.version:
            self._derive()

    def _derive(self) -> None:
        self._version = self.runner.mirror.version
        self._view = make_view(self._mirror, own_cache=self.runner.form is not None)
        self._table_limit = table_limit(self.model.config.get_text_config(decoder=True))

    @property
    def vocabulary(self) -> int:
        """How many logits the model gives for a token."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def layout(
        self,
        context: EncodedContext,
        recorder: WeightRecorder | None = None,
        kind: type[PromptLayout] = PromptLayout,
    ) -> PromptLayout:
        """The layout of queries against a context that has windows."""
        method, windows = context.method, cast(Windows | Members, context.windows)
        if recorder is not None and isinstance(windows, Windows):
            recorder.span_groups = windows.span_groups
        numbers: dict[str, Any] = {
            "prefix": context.prefix,
            "query_start": context.query_start,
            "sliding_windows": self.runner.sliding_windows,
            "windows": windows,
            "temperature": method.temperature,
            "rescaling": Rescaling(method.slope, method.shift, query_bias(method, windows.count)),
            "recorder": recorder,
        }
        if isinstance(windows, Members):
            combination = method.combination or ParallelEnsemble()
            return EnsembleLayout(**numbers, members=windows, combination=combination)
        return kind(**numbers)

    def for_query(
        self,
        context: EncodedContext,
        query_ids: Sequence[int],
        question: tuple[int, int] | None = None,
    ) -> EncodedContext:
        """What this query reads, where a step of the method waits for it.

        Such a step chooses the windows that are read, or tokens of them to encode again. The given
        context stays as it is, for other queries; it comes back itself where nothing waits.
        ``question`` is where the last question begins and ends in the query, if that is known.
        """
        self._check_layers(context)
        if not context.waits:
            return context
        selection = context.method.selection
        if isinstance(selection, QueryLikelihood):
            rows = rows_of(context)
            layout = cast(EnsembleLayout, self.layout(rows))
            question = question or question_of(query_ids, self.end_tokens({}))
            return read_likeliest(
                selection, context, query_ids, question, self.runner, rows, layout
            )
        if selection is not None:
            return select(selection, context, query_ids, self.runner)
        attention = cast(AttentionLayout, self.layout(context, kind=AttentionLayout))
        plan = context.method.recompute
        attention.last = plan is not None and plan.choose == "last"
        check_tables(self._table_limit, context.query_start + len(query_ids))
        return encode_again_for(context, query_ids, self.runner.of_windows, attention)

    def chances(
        self,
        context: EncodedContext,
        query_ids: Sequence[int],
        answer_ids: Sequence[int],
        left_out: Sequence[Collection[int]],
        check: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """How likely an answer is when some passages are left out; see `removal.chances`."""
        self.follow()
        check_tables(self._table_limit, context.query_start + len(query_ids) + len(answer_ids))

        def layout(one: EncodedContext) -> EnsembleLayout:
            return cast(EnsembleLayout, self.layout(one))

        return chances(
            self.runner, context, query_ids, answer_ids, layout, self.forward, left_out, check
        )

    def removal(
        self,
        context: EncodedContext,
        query_ids: Sequence[int],
        answer_ids: Sequence[int],
        groups: Sequence[int] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Removal:
        """What an answer loses without each passage, named by citation group; None for all."""
        read = list(dict.fromkeys(context.groups))
        groups = read if groups is None else list(groups)
        asked = [(), *((group,) for group in groups), read]
        whole, *left, none = self.chances(context, query_ids, answer_ids, asked, check)
        return Removal(whole, dict(zip(groups, left, strict=True)), none, tuple(read))

    def _check_layers(self, context: EncodedContext) -> None:
        """Refuse another model's keys and values: layers beyond ours would never be read."""
        if context.windows is None:
            return
        held, layers = len(context.each[0].keys), len(self.runner.sliding_windows)
        if self.runner.form is not None:
            found, own = {*context.each[0].layers}, self.runner.form.layers
            held, layers = len(found) or held, len(own) if found == own else 0
        if held != layers:
            raise InputError(
                f"This context was encoded by another model: it has {held} layers, but this model "
                f"has {layers}. Encode it again with this model (encode_ids)."
            )

    def _reader(self, context: EncodedContext) -> PreTrainedModel:
        """What reads the windows: the mirror, or the view that asks each of them."""
        return self._view if isinstance(context.windows, Members) else self._mirror

    def forward(
        self,
        context: EncodedContext,
        ids: torch.Tensor,
        cache: Any = None,
        past: int = 0,
        *,
        last: int | None = None,
        recorder: WeightRecorder | None = None,
        gradients: bool = False,
    ) -> torch.Tensor:
        """Logits of query tokens.

        Args:
            ids: (rows, tokens) int64; right-padding is allowed, its logits mean nothing.
            cache: the HF cache to continue (``context.new_cache(rows)``), or None for a fresh one.
            past: query tokens that the cache holds already.
            last: only the logits of so many last tokens are computed; None for all.
            recorder: of attention weights, where there are windows.
            gradients: whether they flow back to the windows' keys and values.

        Returns:
            (rows, tokens or ``last``, vocabulary) in the model's dtype.
        """
        with torch.set_grad_enabled(gradients):
            return self._forward(context, ids, cache, past, last, recorder)

    def _forward(
        self,
        context: EncodedContext,
        ids: torch.Tensor,
        cache: Any,
        past: int,
        last: int | None,
        recorder: WeightRecorder | None,
    ) -> torch.Tensor:
        if past == 0:
            self.follow()
        self._check_layers(context)
        rows, tokens = ids.shape
        if rows == 1 and past == 0:
            context = self.for_query(context, ids[0].tolist())
        if context.waits:
            raise InputError(
                f"The method {context.method.name!r} chooses what each query reads. Make the "
                "context that of one query first, with Decoder.for_query(context, query_ids)."
            )
        ids = ids.to(input_device(self.model))
        extra = {} if last is None else {"logits_to_keep": last}
        if context.windows is None:
            before = context.prefix_ids if past == 0 else ()
            prefix = torch.tensor(before, dtype=torch.int64, device=ids.device)
            whole = torch.cat([prefix.expand(rows, -1), ids], dim=1)
            if context.form is not None:
                return self._by_own_cache(context.form, whole, cache, past, last or tokens)
            held = {CACHE: cache, "use_cache": cache is not None}
            output = self.model(whole, **held, **extra)
            return torch.as_tensor(output.logits)[:, -(last or tokens) :]
        start = context.query_start + past
        positions = torch.arange(start, start + tokens, device=ids.device).expand(rows, -1)
        cache = context.new_cache(rows) if cache is None else cache
        check_tables(self._table_limit, start + tokens)
        with use_layout(self.layout(context, recorder)):
            output = self._reader(context)(
                ids, position_ids=positions, **{CACHE: cache}, use_cache=True, **extra
            )
        return torch.as_tensor(output.logits)[:, -(last or tokens) :]

    def _by_own_cache(
        self, form: ModelCache, ids: torch.Tensor, cache: Any, past: int, last: int
    ) -> torch.Tensor:
        """Logits of tokens behind so many others, where nothing but the model's own cache is."""
        start = 0 if cache is None or past == 0 else past
        places = torch.arange(start, start + ids.shape[1], device=ids.device)
        own = form.fresh() if cache is None else cache
        lengths = [start] * len(ids)
        return form.feed(self._mirror, ids, own, lengths, places.expand(len(ids), -1), last)

    def generate(
        self,
        context: EncodedContext,
        query_ids: Sequence[int],
        *,
        options: Mapping[str, Any],
        seed: int | None = None,
        record_weights: bool = False,
        streamer: BaseStreamer | None = None,
        stopping: Callable[[int], Sequence[StoppingCriteria]] = lambda _: (),
    ) -> Decoded:
        """Run ``transformers`` generate.

        Args:
            context: what the query reads.
            query_ids: at least one token.
            options: of ``PreTrainedModel.generate``, but for those that `sampling` refuses.
            seed: of a private generator for sampling, or None for PyTorch's global one.
            record_weights: whether to record attention weights; if not, they cost nothing.
            streamer: as in transformers.
            stopping: from the number of tokens before the generated ones, the criteria beside
                those in ``options``.

        Raises:
            GenerationError: an option that can't work.
            InputError: no query tokens.
        """
        if not query_ids:
            raise InputError("The query has no tokens. Give at least one.")
        self.follow()
        context = self.for_query(context, query_ids)
        refuse_model_inputs(options)
        windowed = context.windows is not None
        if windowed:
            refuse(WITHOUT_WINDOWS, partial(self.option, options), "windows")
        if isinstance(context.windows, Members):
            refuse(WITHOUT_ROWS, partial(self.option, options), "an ensemble of windows")
        # Assisted decoding feeds the whole input in its first step, whatever the cache holds.
        assisted = any(self.option(options, name) is not None for name in ASSISTED)
        seen = 0 if assisted and windowed else len(context.prefix_ids)
        prompt = [*context.prefix_ids[:seen], *query_ids]
        device = input_device(self.model)
        kwargs = self.arguments(options, len(prompt), stopping(len(prompt)))
        recorder: WeightRecorder | None = None
        with ExitStack() as scope:
            if windowed:
                start, end = context.query_start, context.query_start + len(query_ids)
                check_tables(self._table_limit, end + (self.option(kwargs, "max_new_tokens") or 0))
                rows = max(self.option(kwargs, name) or 1 for name in BATCHING)
                positions = [[*range(seen), *range(start, end)]]
                kwargs[CACHE] = context.new_cache(rows)
                # The prefix is read only from the cache, so it can't be left out.
                kwargs["use_cache"] = True
                kwargs["position_ids"] = torch.tensor(positions, device=device)
                # In one row that is read as a whole, no passage has a share that is known.
                known = context.form is None or context.method.combination is not None
                recorder = WeightRecorder(end - 1) if record_weights and known else None
                scope.enter_context(use_layout(self.layout(context, recorder)))
            scope.enter_context(seeded(seed, device))
            kwargs = with_config(kwargs)
            inputs = torch.tensor([prompt], dtype=torch.int64, device=device)
            target = self._reader(context) if windowed else self.model
            raw = target.generate(inputs, streamer=streamer, **kwargs)
        return self._decoded(raw, len(prompt), kwargs, recorder)

    def arguments(
        self, options: Mapping[str, Any], prompt_length: int, criteria: Sequence[Any]
    ) -> dict[str, Any]:
        """Arguments of transformers' generate for one prompt; ``criteria`` join the caller's."""
        kwargs = dict(options)
        config = self.model.generation_config
        if self.option(kwargs, "pad_token_id") is None:
            eos = self.option(kwargs, "eos_token_id")
            if eos is not None and config.pad_token_id is None:
                kwargs["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
        kwargs["attention_mask"] = torch.ones(
            1, prompt_length, dtype=torch.int64, device=input_device(self.model)
        )
        kwargs["return_dict_in_generate"] = True
        kwargs["stopping_criteria"] = StoppingCriteriaList(
            [*(kwargs.get("stopping_criteria") or []), *criteria]
        )
        if kwargs.get("logits_processor") is not None:
            kwargs["logits_processor"] = LogitsProcessorList(kwargs["logits_processor"])
        return kwargs

    def option(self, kwargs: Mapping[str, Any], name: str) -> Any:
        """The value that ``generate`` will use: keyword, passed config, the model's config."""
        if kwargs.get(name) is not None:
            return kwargs[name]
        passed = getattr(kwargs.get("generation_config"), name, None)
        return passed if passed is not None else getattr(self.model.generation_config, name, None)

    def by_token(self, options: Mapping[str, Any]) -> bool:
        """Whether tokens are final as they come: not with beams or several sequences."""
        return all(self.option(options, name) in (None, 1) for name in BATCHING)

    def end_tokens(self, options: Mapping[str, Any]) -> frozenset[int]:
        """Ids that end a generation under these options."""
        eos = self.option(options, "eos_token_id")
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    def _decoded(
        self,
        raw: Any,
        prompt_length: int,
        kwargs: Mapping[str, Any],
        recorder: WeightRecorder | None,
    ) -> Decoded:
        ends = self.end_tokens(kwargs)
        pad = self.option(kwargs, "pad_token_id")
        sequences, rows = [], []
        beams = getattr(raw, "beam_indices", None)
        for index, row in enumerate(raw.sequences[:, prompt_length:].tolist()):
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            while end == len(row) and len(raw.sequences) > 1 and end and row[end - 1] == pad:
                row.pop()
                end = len(row)
            sequences.append(row[:end])
            if beams is None:
                rows.append([index] * end)
            else:
                rows.append([max(0, int(beam)) for beam in beams[index][:end]])
        return Decoded(sequences, raw, recorder, rows)


def with_config(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for generate, with those that a passed config knows written into a copy of it."""
    if kwargs.get("generation_config") is None:
        return kwargs
    # transformers takes options or a config, but wants no mixture of both.
    config = copy.deepcopy(kwargs.pop("generation_config"))
    return {**config.update(**kwargs), "generation_config": config}
