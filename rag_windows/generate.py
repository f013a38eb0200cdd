"""Token-level generation: transformers' own loop over the KV cache, the windows beside it."""

from __future__ import annotations

import copy
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from rag_windows.attention.layers import check_tables, table_limit
from rag_windows.attention.layout import PromptLayout, WeightRecorder, use_layout
from rag_windows.errors import GenerationError, InputError
from rag_windows.kv import Members
from rag_windows.loading import input_device
from rag_windows.methods import query_bias
from rag_windows.prefill import EncodedContext, Encoder, require_narrowed
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.results import TokenLogprob
from rag_windows.steps.ensemble import EnsembleLayout, make_view
from rag_windows.steps.selection import select


class SeededSampling(TorchFunctionMode):
    """Draws every token of one call from a generator of its own.

    transformers samples from PyTorch's global generator, which all threads share. This mode, which
    PyTorch keeps per thread, hands a private one to ``torch.multinomial``; the numbers are those
    that ``torch.manual_seed(seed)`` would give a process with a single thread.

    Args:
        seed: of the private generator.
        device: where the probabilities are.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass every call on; give ``torch.multinomial`` our generator."""
        kwargs = dict(kwargs or {})
        if func is torch.multinomial:
            kwargs.setdefault("generator", self._generator)
        return func(*args, **kwargs)


def seeded(seed: int | None, device: torch.device) -> AbstractContextManager[Any]:
    """The mode for ``seed``, or nothing for None (the global generator, as in transformers)."""
    return nullcontext() if seed is None else SeededSampling(seed, device)


def sampling_options(temperature: float | None, top_p: float | None = None) -> dict[str, Any]:
    """Options of ``generate``: temperature 0 is greedy, more samples, None leaves it to the model.

    Args:
        temperature: of the next token's distribution, at least 0.
        top_p: nucleus sampling, in (0, 1].
    """
    if temperature == 0:
        return {"do_sample": False}
    chosen = {"temperature": temperature, "top_p": top_p}
    options = {name: value for name, value in chosen.items() if value is not None}
    return {"do_sample": True, **options} if options else {}


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

WITHOUT_ROWS: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_hidden_states": (
        OFF,
        "each window answers in a row of its own, so there is no one row",
    ),
}
"""The same for windows that answer each for itself."""


WHOLE = ("max_new_tokens", "num_beams", "num_return_sequences", "prefill_chunk_size")
"""Options that count something, of which transformers takes values that it can't work with."""


def whole_number(name: str, value: object, least: int = 1) -> int:
    """A number that counts something, as an int.

    Args:
        name: of the argument.
        value: an int, or another type's whole number, such as numpy's.
        least: the smallest one that is allowed.

    Raises:
        InputError: it is another kind of value, or below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # what is none raises TypeError
    except TypeError:
        raise InputError(
            f"{name} must be a whole number of at least {least}, got {value!r}."
        ) from None
    if number < least:
        raise InputError(f"{name} must be at least {least}, got {number}.")
    return number


def check_counts(options: Mapping[str, Any]) -> None:
    """Refuse options that count something with what is no count.

    Args:
        options: of ``generate``, which may hold a ``generation_config``.

    Raises:
        InputError: naming the first.
    """
    for name in WHOLE:
        for given in (options.get(name), getattr(options.get("generation_config"), name, None)):
            if given is not None:
                whole_number(name, given)


def refuse_ours(options: Mapping[str, Any]) -> None:
    """Refuse model inputs among a caller's options.

    Raises:
        GenerationError: naming them.
    """
    taken = sorted(set(options) & set(OURS))
    if taken:
        raise GenerationError(
            f"{taken} can't be passed to generate: rag-windows builds them from the query and "
            "the passages. Use encode_ids and generate_ids for token-level work."
        )


def refuse(
    table: Mapping[str, tuple[tuple[Any, ...], str]], option: Callable[[str], Any], what: str
) -> None:
    """Refuse options that a table names.

    Args:
        table: per option, the values that switch it off, and why it can't be on.
        option: the value that generate would use.
        what: how the error calls what they can't be used with.

    Raises:
        GenerationError: naming the first.
    """
    for name, (off, reason) in table.items():
        value = option(name)
        plain = value is None or isinstance(value, bool | str | int | float)
        if not plain or value not in off:
            raise GenerationError(
                f"{name}={value!r} can't be used with {what}: {reason}. Leave it out (of "
                "the generation_config too), or ask without passages."
            )


class Cancelled(StoppingCriteria):
    """Stops every row once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,)."""
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


class FirstToken(StoppingCriteria):
    """Never stops; remembers when the first token was there (``time.perf_counter``)."""

    def __init__(self) -> None:
        self.seen_at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,), all False."""
        if self.seen_at is None:
            self.seen_at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


MOST = 20
"""Further tokens that may be asked for at each place."""


class LogprobRecorder(LogitsProcessor):
    """Notes the distribution of each token of one answer.

    Args:
        top: how many of the likeliest tokens to note in each place.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._first: int | None = None
        self._noted: dict[int, TokenLogprob] = {}
        self._newest: tuple[int, torch.Tensor] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note; the scores stay as they are."""
        if len(scores) != 1:
            raise GenerationError(
                "logprobs are those of one sequence; leave num_beams and num_return_sequences out."
            )
        length = input_ids.shape[1]
        if self._first is None or length <= self._first:
            self._first, self._noted = length, {}
        elif self._newest is not None:
            place, row = self._newest
            self._noted[place] = self._note(int(input_ids[0, place]), row)
        self._newest = length, scores[0].float().log_softmax(-1)
        return scores

    def tokens(self, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """What was noted of an answer with these tokens."""
        if self._first is None or not ids:
            return ()
        noted = dict(self._noted)
        if self._newest is not None and self._newest[0] == self._first + len(ids) - 1:
            place, row = self._newest
            noted[place] = self._note(ids[-1], row)
        return tuple(noted[self._first + place] for place in range(len(ids)))

    def _note(self, token: int, row: torch.Tensor) -> TokenLogprob:
        best = row.topk(self._top)
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprob(token, float(row[token]), tuple(top))


def recorder_of(options: dict[str, Any]) -> LogprobRecorder | None:
    """Take ``logprobs`` and ``top_logprobs`` out of the options of ``generate``.

    Returns:
        What notes them, which then stands first among the options' logits processors; or None.

    Raises:
        InputError: they can't be had with the other options.
    """
    wanted, top = options.pop("logprobs", None), options.pop("top_logprobs", None)
    if not isinstance(wanted, bool | None):
        raise InputError(
            f"logprobs must be True or False, got {wanted!r}; top_logprobs is a number of tokens."
        )
    if top is not None and (not isinstance(top, int) or not 0 <= top <= MOST):
        raise InputError(f"top_logprobs must be a whole number from 0 to {MOST}, got {top!r}.")
    if not wanted:
        if top:
            raise InputError("top_logprobs needs logprobs=True.")
        return None
    for name in ASSISTED:
        if options.get(name) is not None:
            raise InputError(
                f"logprobs can't be noted with {name}, which checks drafts of several tokens at "
                "once; leave one of them out."
            )
    recorder = LogprobRecorder(top or 0)
    options["logits_processor"] = [recorder, *(options.get("logits_processor") or [])]
    return recorder


class StopStrings(StoppingCriteria):
    """Stops a row when its generated text holds one of the strings.

    Args:
        detokenizer: of the model's tokenizer.
        stop: the strings.
        prompt_length: tokens before the generated ones.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], prompt_length: int) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,)."""
        done = [
            self._detokenizer.find_stop(row, self._stop) is not None
            for row in input_ids[:, self._prompt_length :].tolist()
        ]
        return torch.tensor(done, device=input_ids.device)


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
    mass: WeightRecorder | None
    rows: list[list[int]]

    def weights(self, index: int) -> list[float] | None:
        """Attention of one sequence's tokens, on average: citation groups, prefix, query."""
        if self.mass is None:
            return None
        first, rows = self.mass.first_position, self.rows[index]
        weights: list[float] = self.mass.average([*range(first, first + len(rows))], rows).tolist()
        return weights


class Decoder:
    """Generates against encoded contexts; holds no state of a call.

    Args:
        model: the plain model, used where there are no windows.
        runner: runs the same weights with our attention.
    """

    def __init__(self, model: PreTrainedModel, runner: Encoder) -> None:
        self.model = model
        self.runner = runner
        self._twin = runner.model
        self._derive()

    def follow(self) -> None:
        """Take over what was edited in the model since the last call; see `Encoder.follow`."""
        self.runner.follow()
        if self._version != self.runner.twin.version:
            self._derive()

    def _derive(self) -> None:
        self._version = self.runner.twin.version
        self._view = make_view(self._twin)
        self._table_limit = table_limit(self.model.config.get_text_config(decoder=True))

    @property
    def vocabulary(self) -> int:
        """How many logits the model gives for a token."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def layout(
        self, context: EncodedContext, mass: WeightRecorder | None = None
    ) -> PromptLayout | None:
        """The layout of queries against ``context``; None without windows."""
        if context.windows is None:
            return None
        method, windows = context.method, context.windows
        numbers: dict[str, Any] = {
            "prefix_length": len(context.prefix_ids),
            "query_start": context.query_start,
            "reach": self.runner.reach,
            "windows": windows,
            "temperature": method.temperature,
            "slope": method.slope,
            "shift": method.shift,
            "query_bias": query_bias(method, windows.count),
            "recorder": mass,
        }
        if isinstance(windows, Members) and method.combination is not None:
            return EnsembleLayout(**numbers, members=windows, combination=method.combination)
        return PromptLayout(**numbers)

    def narrowed(self, context: EncodedContext, query_ids: Sequence[int]) -> EncodedContext:
        """What this query reads, where the method chooses windows for each one.

        The context itself where it does not, or where that is done already.
        """
        self._check_layers(context)
        selection = context.method.selection
        if selection is None or context.windows is None or context.chosen is not None:
            return context
        return select(selection, context, query_ids, self.runner)

    def _check_layers(self, context: EncodedContext) -> None:
        """Refuse another model's keys and values: layers beyond ours would never be read."""
        windows = context.windows
        if windows is None:
            return
        keys = windows.windows[0].keys if isinstance(windows, Members) else windows.keys
        if len(keys) != len(self.runner.reach):
            raise InputError(
                f"This context was encoded by another model: it has {len(keys)} layers, and this "
                f"model has {len(self.runner.reach)}. Encode it again with this one (encode_ids)."
            )

    def _reader(self, context: EncodedContext) -> PreTrainedModel:
        """What reads the windows: the twin, or the view that asks each of them."""
        return self._view if isinstance(context.windows, Members) else self._twin

    @torch.no_grad()
    def forward(
        self,
        context: EncodedContext,
        ids: torch.Tensor,
        tail: Any = None,
        past: int = 0,
        *,
        last: int | None = None,
        mass: WeightRecorder | None = None,
    ) -> torch.Tensor:
        """Logits of query tokens.

        Args:
            context: what they read.
            ids: (rows, tokens) int64; right-padding is allowed, its logits mean nothing.
            tail: the HF cache to continue (``context.new_tail(rows)``), or None for a fresh one.
            past: query tokens that the tail holds already.
            last: only the logits of so many last tokens are computed; None for all.
            mass: records attention mass where there are windows.

        Returns:
            (rows, tokens or ``last``, vocabulary) in the model's dtype.
        """
        if past == 0:
            self.follow()
        self._check_layers(context)
        rows, tokens = ids.shape
        if rows == 1 and past == 0 and context.method.selection is not None:
            context = self.narrowed(context, ids[0].tolist())
        require_narrowed(context)
        ids = ids.to(input_device(self.model))
        layout = self.layout(context, mass)
        kept = {} if last is None else {"logits_to_keep": last}
        if layout is None:
            prefix = torch.tensor(context.prefix_ids, dtype=torch.int64, device=ids.device)
            whole = torch.cat([prefix.expand(rows, -1), ids], dim=1)
            return torch.as_tensor(self.model(whole, **kept).logits)[:, -(last or tokens) :]
        start = context.query_start + past
        positions = torch.arange(start, start + tokens, device=ids.device).expand(rows, -1)
        tail = context.new_tail(rows) if tail is None else tail
        check_tables(self._table_limit, start + tokens)
        with use_layout(layout):
            output = self._reader(context)(
                ids, position_ids=positions, past_key_values=tail, use_cache=True, **kept
            )
        return torch.as_tensor(output.logits)[:, -(last or tokens) :]

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
            options: of ``PreTrainedModel.generate``, but for those in `refused_options`.
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
        self.follow()
        context = self.narrowed(context, query_ids)
        refuse_ours(options)
        if context.windows is not None:
            refuse(WITHOUT_WINDOWS, partial(self.option, options), "windows")
        if isinstance(context.windows, Members):
            refuse(WITHOUT_ROWS, partial(self.option, options), "an ensemble of windows")
        # Assisted decoding feeds the whole input in its first step, whatever the cache holds.
        assisted = any(self.option(options, name) is not None for name in ASSISTED)
        seen = 0 if assisted and context.windows is not None else len(context.prefix_ids)
        prompt = [*context.prefix_ids[:seen], *query_ids]
        device = input_device(self.model)
        kwargs = self.arguments(options, len(prompt), stopping(len(prompt)))
        last = context.query_start + len(query_ids) - 1
        mass = WeightRecorder(last) if record_mass and context.windows is not None else None
        layout = self.layout(context, mass)
        target = self.model
        if layout is not None:
            target = self._reader(context)
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
        kwargs = with_config(kwargs)
        inputs = torch.tensor([prompt], dtype=torch.int64, device=device)
        with ExitStack() as scope:
            if layout is not None:
                scope.enter_context(use_layout(layout))
            scope.enter_context(seeded(seed, device))
            raw = target.generate(inputs, streamer=streamer, **kwargs)
        return self._decoded(raw, len(prompt), kwargs, mass)

    def arguments(
        self, options: Mapping[str, Any], prompt_length: int, criteria: Sequence[Any]
    ) -> dict[str, Any]:
        """Arguments of transformers' generate for one prompt.

        Args:
            options: the caller's.
            prompt_length: tokens of the prompt.
            criteria: stopping criteria beside the caller's.
        """
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
        self, raw: Any, prompt_length: int, kwargs: Mapping[str, Any], mass: WeightRecorder | None
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


def with_config(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for generate, with those that a passed config knows written into a copy of it."""
    if kwargs.get("generation_config") is None:
        return kwargs
    # transformers takes options or a config, but wants no mixture of both.
    config = copy.deepcopy(kwargs.pop("generation_config"))
    return {**config.update(**kwargs), "generation_config": config}


BATCHING = ("num_beams", "num_return_sequences")
"""Options that make several rows out of one prompt."""

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")
"""Options that make the model check drafts of several tokens at once."""
