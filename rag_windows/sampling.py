"""Options of transformers' ``generate``: those that are refused, and what we add to a call."""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
)

from rag_windows.errors import GenerationError, InputError, did_you_mean
from rag_windows.prompt.detokenize import AnswerDivider, Detokenizer, TextStream
from rag_windows.results import TokenLogprob

MODEL_INPUTS = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache",
)
"""What the windows decide; a caller can't pass them."""

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
"""Options that can't work beside windows: values that switch them off, and why."""

WITHOUT_ROWS: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_hidden_states": (
        OFF,
        "each window answers in a row of its own, so there is no one row",
    ),
}
"""The same for windows that answer each for itself."""

WHOLE = ("max_new_tokens", "num_beams", "num_return_sequences", "prefill_chunk_size")
"""Options that count something, of which transformers takes values that it can't work with."""

UNNAMED = ("tokenizer", "assistant_tokenizer", "trust_remote_code")
"""What ``generate`` takes without a parameter of the name."""

OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "system": "prefix",
    "system_prompt": "prefix",
    "instruction": "prefix",
    "documents": "passages",
    "docs": "passages",
    "contexts": "passages",
    "question": "query",
    "messages": "query",
}
"""What other libraries call our arguments."""

BATCHING = ("num_beams", "num_return_sequences")
"""Options that make several rows out of one prompt."""

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")
"""Options that make the model check drafts of several tokens at once."""

MOST_LOGPROBS = 20
"""Further tokens that may be asked for at each place."""


def sampling_options(temperature: float | None, top_p: float | None = None) -> dict[str, Any]:
    """Options of ``generate``: temperature 0 is greedy, None leaves it to the model."""
    if temperature == 0:
        return {"do_sample": False}
    chosen = {"temperature": temperature, "top_p": top_p}
    options = {name: value for name, value in chosen.items() if value is not None}
    return {"do_sample": True, **options} if options else {}


def whole_number(name: str, value: object, least: int = 1) -> int:
    """A number that counts something, as an int; it may be numpy's.

    Raises:
        InputError: it is another kind of value, or below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # what is none raises TypeError
    except TypeError:
        raise InputError(
            f"{name} must be a whole number of at least {least}, not {value!r}."
        ) from None
    if number < least:
        raise InputError(f"{name} must be at least {least}, not {number}.")
    return number


LARGEST = {"temperature": math.inf, "top_p": 1.0, "min_p": 1.0}
"""Options of sampling that are at least 0; transformers refuses others only where it samples."""


def check_numbers(options: Mapping[str, Any]) -> None:
    """Refuse numbers among options of ``generate`` and its config that it can't work with."""
    for name in (*WHOLE, *LARGEST):
        for given in (options.get(name), getattr(options.get("generation_config"), name, None)):
            if given is None:
                continue
            if name in WHOLE:
                whole_number(name, given)
                continue
            number = isinstance(given, numbers.Real) and not isinstance(given, bool)
            if not number or not 0 <= float(given) <= LARGEST[name] or math.isinf(given):
                most = "of at least 0" if name == "temperature" else "from 0 to 1"
                raise InputError(f"{name} must be a number {most}, not {given!r}.")


def check_names(options: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Refuse options that neither ``generate`` nor the model has, before anything is computed."""
    if callable(options.get("custom_generate")):  # It may take arguments of its own.
        return
    config = getattr(model, "generation_config", None)
    known = {*vars(GenerationConfig()), *vars(config or GenerationConfig()), *UNNAMED}
    # A wrapper such as PEFT's has a generate of its own that takes whatever it is given.
    for function in (
        GenerationMixin.generate,
        model.generate,
        model.forward,
        model.prepare_inputs_for_generation,
    ):
        known |= {*inspect.signature(function).parameters}
    for name in options:
        if name not in known and name not in MODEL_INPUTS:
            meant = OTHER_NAMES.get(name)
            near = f"Did you mean {meant!r}?" if meant else did_you_mean(name, known)
            raise InputError(
                f"No argument of generate is called {name!r}. {near or 'Leave it out.'}"
            )


def refuse_model_inputs(options: Mapping[str, Any]) -> None:
    """Refuse model inputs among a caller's options."""
    taken = sorted(set(options) & set(MODEL_INPUTS))
    if taken:
        raise GenerationError(
            f"{taken} can't be passed to generate: rag-windows builds them from the query and "
            "the passages. Use encode_ids and generate_ids for token-level work."
        )


def refuse(
    table: Mapping[str, tuple[tuple[Any, ...], str]], option: Callable[[str], Any], what: str
) -> None:
    """Refuse options that a table names: values that switch each off, and why it can't be on.

    Args:
        option: the value that generate would use.
        what: how the error calls what they can't be used with.
    """
    for name, (off, reason) in table.items():
        value = option(name)
        plain = value is None or isinstance(value, bool | str | int | float)
        if not plain or value not in off:
            raise GenerationError(
                f"{name}={value!r} can't be used with {what}: {reason}. Leave it out (also out of "
                "the generation_config), or ask without passages."
            )


class SeededSampling(TorchFunctionMode):
    """Draws every token of one call from a generator of its own.

    transformers samples from PyTorch's global generator, which all threads share. This mode, which
    PyTorch keeps per thread, hands a private one to ``torch.multinomial``; the numbers are those
    that ``torch.manual_seed(seed)`` would give a process with a single thread.
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


class StopStrings(StoppingCriteria):
    """Stops a row when its text behind ``prompt_length`` tokens holds one of the strings."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        prompt_length: int,
        parts: AnswerDivider | None = None,
    ) -> None:
        self._start = self._seen = prompt_length
        self._fresh = TextStream(detokenizer, stop, parts)
        self._single = self._fresh.fork()
        # The texts of several rows, by the bytes of the generated tokens that were seen.
        self._rows: dict[bytes, TextStream] = {}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,)."""
        seen, self._seen = self._seen, input_ids.shape[1]
        if len(input_ids) == 1:
            # It only grows, so the tokens before need not be looked at.
            self._single.feed(input_ids[0, seen:].tolist())
            return torch.tensor([self._single.stopped], device=input_ids.device)
        # Beams change places: the tokens before tell which text a row goes on with.
        rows: list[tuple[bytes, TextStream]] = []
        for row in input_ids[:, self._start :].cpu().numpy():
            before = self._rows.get(row[: seen - self._start].tobytes())
            stream = (before or self._fresh).fork()
            stream.feed(row[seen - self._start if before else 0 :].tolist())
            rows.append((row.tobytes(), stream))
        self._rows = dict(rows)
        return torch.tensor([stream.stopped for _, stream in rows], device=input_ids.device)


class LogprobRecorder(LogitsProcessor):
    """Notes the distribution of each token of one answer, with the ``top`` likeliest tokens."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._first: int | None = None
        self._noted: dict[int, TokenLogprob] = {}
        self._newest: tuple[int, torch.Tensor] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note; the scores stay as they are."""
        if len(scores) != 1:
            raise GenerationError(
                "logprobs need a single sequence. Leave num_beams and num_return_sequences out."
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


class Penalties(LogitsProcessor):
    """Makes tokens that stand in one answer already less likely, as OpenAI's API defines it.

    From a token's logit goes ``frequency`` times how often it was generated, and ``presence`` once.
    Tokens of the prompt do not count.
    """

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = frequency, presence
        self._prompt: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores, (1, vocabulary)."""
        if len(scores) != 1:
            raise GenerationError(
                "Penalties need a single sequence. Leave num_beams and num_return_sequences out."
            )
        length = input_ids.shape[1]
        self._prompt = length if self._prompt is None else min(self._prompt, length)
        ids, counts = input_ids[0, self._prompt :].unique(return_counts=True)
        scores = scores.clone()
        scores[0, ids] -= self._frequency * counts.to(scores.dtype) + self._presence
        return scores


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
            f"logprobs must be True or False, not {wanted!r}. A number of tokens belongs into "
            "top_logprobs."
        )
    if top is not None and (not isinstance(top, int) or not 0 <= top <= MOST_LOGPROBS):
        raise InputError(
            f"top_logprobs must be a whole number from 0 to {MOST_LOGPROBS}, not {top!r}."
        )
    if top and not wanted:
        raise InputError("top_logprobs needs logprobs=True. Set it, or leave top_logprobs out.")
    if not wanted:
        return None
    if drafting := [name for name in ASSISTED if options.get(name) is not None]:
        raise InputError(
            f"logprobs can't be combined with {drafting[0]}, which checks several drafted tokens "
            "at once. Leave one of them out."
        )
    recorder = LogprobRecorder(top or 0)
    options["logits_processor"] = [recorder, *(options.get("logits_processor") or [])]
    return recorder
