"""Token-level generation: transformers' own loop over the tail, the windows beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from rag_windows.attention.layout import Layout, use_layout
from rag_windows.attention.mass import MassRecorder
from rag_windows.attention.rope import check_tables, table_limit
from rag_windows.context import EncodedContext
from rag_windows.device import input_device
from rag_windows.errors import GenerationError, InputError
from rag_windows.sampling import seeded

OURS = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
)
"""Model inputs that the windows decide; a caller can't pass them."""

OFF = (None, False)
WITHOUT_WINDOWS: dict[str, tuple[tuple[Any, ...], str]] = {
    # transformers takes "hybrid", the default of older Gemma models, for no wish at all.
    "cache_implementation": ((*OFF, "hybrid"), "the windows' keys stand outside of any cache"),
    "assistant_early_exit": (OFF, "its shortened model would not read the windows"),
    "output_attentions": (
        OFF,
        "fused attention has no weights to return; read Generation.citations",
    ),
    "guidance_scale": ((*OFF, 1), "its second, unconditional pass would read the windows too"),
    "negative_prompt_ids": (OFF, "its second, unconditional pass would read the windows too"),
}
"""Options of ``generate`` that can't work beside windows: values that switch them off, and why."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one run of the loop gave.

    Attributes:
        sequences: generated token ids, one list a returned sequence, padding removed.
        raw: transformers' own output object.
        mass: the recorder, or None.
        rows: per returned sequence and token, which batch row predicted it.
    """

    sequences: list[list[int]]
    raw: Any
    mass: MassRecorder | None
    rows: list[list[int]]


class Decoder:
    """Generates against encoded contexts; holds no state of a call.

    Args:
        model: the plain model, used where there are no windows.
        twin: the same weights with our attention.
        reach: per layer, see `layer_reach`.
    """

    def __init__(
        self, model: PreTrainedModel, twin: PreTrainedModel, reach: tuple[int | None, ...]
    ) -> None:
        self._model = model
        self._twin = twin
        self._reach = reach
        self._table_limit = table_limit(model.config.get_text_config(decoder=True))

    def layout(self, context: EncodedContext, mass: MassRecorder | None = None) -> Layout | None:
        """The layout of queries against ``context``; None without windows."""
        if context.windows is None:
            return None
        return Layout(
            prefix_length=len(context.prefix_ids),
            query_start=context.query_start,
            reach=self._reach,
            windows=context.windows,
            method=context.method,
            mass=mass,
        )

    @torch.no_grad()
    def forward(
        self, context: EncodedContext, ids: torch.Tensor, tail: Any = None, past: int = 0
    ) -> torch.Tensor:
        """Logits of query tokens.

        Args:
            context: what they read.
            ids: (rows, tokens) int64; right-padding is allowed, its logits mean nothing.
            tail: the HF cache to continue (``context.new_tail(rows)``), or None for a fresh one.
            past: query tokens that the tail holds already.

        Returns:
            (rows, tokens, vocabulary) in the model's dtype.
        """
        rows, tokens = ids.shape
        ids = ids.to(input_device(self._model))
        layout = self.layout(context)
        if layout is None:
            prefix = torch.tensor(context.prefix_ids, dtype=torch.int64, device=ids.device)
            whole = torch.cat([prefix.expand(rows, -1), ids], dim=1)
            return torch.as_tensor(self._model(whole).logits)[:, len(context.prefix_ids) :]
        start = context.query_start + past
        positions = torch.arange(start, start + tokens, device=ids.device).expand(rows, -1)
        tail = context.new_tail(rows) if tail is None else tail
        check_tables(self._table_limit, start + tokens)
        with use_layout(layout):
            output = self._twin(ids, position_ids=positions, past_key_values=tail, use_cache=True)
        return torch.as_tensor(output.logits)

    def generate(
        self,
        context: EncodedContext,
        query_ids: Sequence[int],
        *,
        options: Mapping[str, Any],
        seed: int | None = None,
        record_mass: bool = False,
        streamer: BaseStreamer | None = None,
        stopping: Callable[[int], list[Any]] = lambda _: [],
    ) -> Decoded:
        """Run ``transformers`` generate.

        Args:
            context: what the query reads.
            query_ids: at least one token.
            options: of ``PreTrainedModel.generate``, any but those in ``OURS`` and, with windows,
                ``WITHOUT_WINDOWS``.
            seed: of a private generator for sampling, or None for PyTorch's global one.
            record_mass: whether to record attention mass; if not, decoding pays nothing for it.
            streamer: as in transformers.
            stopping: from the number of tokens before the generated ones, the criteria beside
                those in ``options``.

        Raises:
            GenerationError: an option that can't work.
            InputError: no query tokens.
        """
        if not query_ids:
            raise InputError("The query has no tokens; ask something.")
        kwargs = self._options(context, options)
        # Assisted decoding feeds the whole input in its first step, whatever the cache holds.
        assisted = any(self.option(kwargs, name) is not None for name in ASSISTED)
        seen = 0 if assisted and context.windows is not None else len(context.prefix_ids)
        prompt = [*context.prefix_ids[:seen], *query_ids]
        device = input_device(self._model)
        kwargs["attention_mask"] = torch.ones(1, len(prompt), dtype=torch.int64, device=device)
        kwargs["return_dict_in_generate"] = True
        kwargs["stopping_criteria"] = StoppingCriteriaList(
            [*(kwargs.get("stopping_criteria") or []), *stopping(len(prompt))]
        )
        if kwargs.get("logits_processor") is not None:
            kwargs["logits_processor"] = LogitsProcessorList(kwargs["logits_processor"])
        last = context.query_start + len(query_ids) - 1
        mass = MassRecorder(last) if record_mass and context.windows is not None else None
        layout = self.layout(context, mass)
        target = self._model
        if layout is not None:
            target = self._twin
            rows = max(self.option(kwargs, name) or 1 for name in BATCHING)
            start = context.query_start
            kwargs["past_key_values"] = context.new_tail(rows)
            new_tokens = self.option(kwargs, "max_new_tokens") or 0
            check_tables(self._table_limit, start + len(query_ids) + new_tokens)
            # The prefix is read from the tail alone, so it can't be left out.
            kwargs["use_cache"] = True
            kwargs["position_ids"] = torch.tensor(
                [[*range(seen), *range(start, start + len(query_ids))]],
                device=device,
            )
        if kwargs.get("generation_config") is not None:
            # transformers takes options or a config, but wants no mixture of both.
            config = copy.deepcopy(kwargs.pop("generation_config"))
            kwargs = {**config.update(**kwargs), "generation_config": config}
        inputs = torch.tensor([prompt], dtype=torch.int64, device=device)
        scope = nullcontext() if layout is None else use_layout(layout)
        with scope, seeded(seed, device):
            raw = target.generate(inputs, streamer=streamer, **kwargs)
        return self._decoded(raw, len(prompt), kwargs, mass)

    def _options(self, context: EncodedContext, options: Mapping[str, Any]) -> dict[str, Any]:
        taken = sorted(set(options) & set(OURS))
        if taken:
            raise GenerationError(
                f"{taken} can't be passed to generate: rag-windows builds them from the query and "
                "the passages. Use encode_ids and generate_ids for token-level work."
            )
        if context.windows is not None:
            for name, (off, reason) in WITHOUT_WINDOWS.items():
                value = self.option(options, name)
                plain = value is None or isinstance(value, bool | str | int | float)
                if not plain or value not in off:
                    raise GenerationError(
                        f"{name}={value!r} can't be used with windows: {reason}. Leave it out (of "
                        "the generation_config too), or ask without passages."
                    )
        kwargs = dict(options)
        config = self._model.generation_config
        if self.option(kwargs, "pad_token_id") is None:
            eos = self.option(kwargs, "eos_token_id")
            if eos is not None and config.pad_token_id is None:
                kwargs["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
        return kwargs

    def option(self, kwargs: Mapping[str, Any], name: str) -> Any:
        """The value that ``generate`` will use: keyword, passed config, the model's config."""
        if kwargs.get(name) is not None:
            return kwargs[name]
        passed = getattr(kwargs.get("generation_config"), name, None)
        return passed if passed is not None else getattr(self._model.generation_config, name, None)

    def end_tokens(self, options: Mapping[str, Any]) -> frozenset[int]:
        """Ids that end a generation under these options."""
        eos = self.option(options, "eos_token_id")
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    def _decoded(
        self, raw: Any, prompt_length: int, kwargs: Mapping[str, Any], mass: MassRecorder | None
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
        return Decoded(sequences, raw, mass, rows)


BATCHING = ("num_beams", "num_return_sequences")
"""Options that make several rows out of one prompt."""

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")
"""Options that make the model check drafts of several tokens at once."""
