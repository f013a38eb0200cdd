"""The rows of a batch: what each reads, how it gets its tokens, and what it has answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from rag_windows.generate import Decoder, with_config
from rag_windows.kv import Window
from rag_windows.loading import input_device
from rag_windows.methods import query_bias
from rag_windows.prefill import EncodedContext
from rag_windows.sampling import refuse_model_inputs, seeded

OPTIONS = frozenset(
    (
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "do_sample",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "generation_config",
        "logits_processor",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "pad_token_id",
        "prefix_allowed_tokens_fn",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "sequence_bias",
        "stopping_criteria",
        "suppress_tokens",
        "temperature",
        "tokenizer",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
    )
)
"""Options of ``generate`` that choose the next token of one row, or say when to stop."""

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "assistant_early_exit": (None, False),
    "cache_implementation": (None, False, "hybrid"),
    "guidance_scale": (None, 1),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_logits": (None, False),
    "output_scores": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "stop_strings": (None,),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}
"""Options that a config may set, too, and the values with which a row can be one of a batch."""

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def served(decoder: Decoder, options: Mapping[str, Any]) -> bool:
    """Whether a row of a batch can do what these options ask for."""
    if not OPTIONS.issuperset(name for name, value in options.items() if value is not None):
        return False
    return all(decoder.option(options, name) in values for name, values in PLAIN.items())


@dataclass(frozen=True, slots=True)
class Asked:
    """What a loop is asked at token level.

    Attributes:
        context: prefix and windows.
        query_ids: at least one token.
        options: of ``PreTrainedModel.generate``; those that `served` lets pass, with
            ``max_new_tokens``.
        criteria: stopping criteria beside those in ``options``.
        seed: of a private generator, or None for PyTorch's global one.
        cited: whether attention weights are recorded.
        streamer: as in transformers, or None.
    """

    context: EncodedContext
    query_ids: Sequence[int]
    options: dict[str, Any]
    criteria: Sequence[Any] = ()
    seed: int | None = None
    cited: bool = False
    streamer: BaseStreamer | None = field(default=None, repr=False)


def _prepared(model: Any, input_ids: torch.Tensor, **made: Any) -> dict[str, Any]:
    """What ``generate`` makes of its arguments before its loop begins."""
    return made


class Row:
    """One row of the batch.

    ``generate`` itself prepares its processors and criteria, so that defaults, order and refusals
    are its own; then it hands over to its caller's loop. The numbers are the method's, see
    `rag_windows.attention.segments.Reading`.

    Attributes:
        spans: of each window, the tokens of each of its parts that are cited by themselves.
        fed: tokens that the next forward pass takes: at first the whole query, then the newest.
        position: of the first of those.
        weights: attention weights of each span, of the prefix and of the row's own tokens, summed
            over what was recorded; only their shares mean something.
        servable: whether a batch can do what its options turn out to ask for.
        greedy: whether the largest logit is its next token.
        sequence: (1, tokens) int64: the prompt and what was generated.
        error: what ended it, if something did.
    """

    def __init__(self, decoder: Decoder, asked: Asked) -> None:
        refuse_model_inputs(asked.options)
        context, method = asked.context, asked.context.method
        windowed = bool(context.singles)
        self.prefix: Window | None = context.prefix if windowed else None
        self.windows: tuple[Window, ...] = context.singles
        self.spans: list[tuple[int, ...]] = [(len(window.ids),) for window in context.singles]
        if len(context.singles) == 1:
            self.spans = [context.lengths]
        prompt = [*context.prefix_ids, *asked.query_ids]
        # Without windows nothing else holds the prefix, so it begins the row's own KV cache.
        self.fed = list(asked.query_ids) if windowed else prompt
        self.position = context.query_start if windowed else 0
        self.temperature, self.slope, self.shift = method.temperature, method.slope, method.shift
        self.query_bias = query_bias(method, len(context.singles)) if windowed else 0.0
        self.cited = asked.cited and windowed
        self.weights = [0.0] * (len(context.groups) + 2)
        self.error: BaseException | None = None
        self.ended = False
        self._groups, self._n_groups = context.groups, context.n_groups
        model = decoder.runner.model if windowed else decoder.model
        device = input_device(model)
        arguments = with_config(decoder.arguments(asked.options, len(prompt), asked.criteria))
        self.sequence = torch.tensor([prompt], dtype=torch.int64, device=device)
        made: Any = model.generate(self.sequence, custom_generate=_prepared, **arguments)
        self._processors, self._criteria = made["logits_processor"], made["stopping_criteria"]
        self._sampling = bool(made["generation_config"].do_sample)
        self.servable = made["generation_config"].get_generation_mode() in _MODES
        self.greedy = not self._sampling and not self._processors
        self._ends = decoder.end_tokens(arguments)
        self._scope = seeded(asked.seed, device)
        self._streamer = asked.streamer
        self._prompt = len(prompt)
        if self._streamer is not None and self.servable:
            self._streamer.put(self.sequence.cpu())

    def leave(self) -> None:
        """Read nothing any more."""
        self.prefix, self.windows = None, ()

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
        new = self.sequence.new_tensor([[token]])
        self.sequence = torch.cat([self.sequence, new], dim=1)
        if self._streamer is not None:
            self._streamer.put(new[0].cpu())
        # Scores are kept for nobody, as without output_scores.
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
        if not self.cited:
            return None
        *spans, prefix, query = self.weights
        whole = [*[0.0] * self._n_groups, prefix, query]
        for group, weight in zip(self._groups, spans, strict=True):
            whole[group] += weight
        total = sum(whole)
        return [weight / total for weight in whole]
