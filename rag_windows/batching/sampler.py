"""How a row of a batch gets its tokens: by transformers' own processors, criteria and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationConfig, GenerationMode
from transformers.generation.streamers import BaseStreamer

from rag_windows.generate import Decoder, with_config
from rag_windows.loading import input_device
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
class _Prepared:
    """What ``generate`` makes of its arguments before its loop begins."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


def _prepared(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **_: Any,
) -> _Prepared:
    return _Prepared(logits_processor, stopping_criteria, generation_config)


class Sampler:
    """Samples the tokens of one row as ``generate`` would.

    ``generate`` itself prepares the processors and criteria, so that defaults, order and refusals
    are its own; then it hands over to its caller's loop.

    Attributes:
        ids: the tokens so far.
        ended: whether a criterion has ended the row.

    Args:
        decoder: of the model.
        prompt: tokens that processors see before the generated ones.
        options: of ``generate``.
        criteria: stopping criteria beside those in ``options``.
        seed: of a private generator, or None for PyTorch's global one.
        streamer: told the prompt and each token; or None.
        windowed: whether the row reads windows.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        options: Mapping[str, Any],
        criteria: Sequence[Any],
        seed: int | None,
        streamer: BaseStreamer | None,
        *,
        windowed: bool,
    ) -> None:
        refuse_model_inputs(options)
        model = decoder.runner.model if windowed else decoder.model
        device = input_device(model)
        arguments = with_config(decoder.arguments(options, len(prompt), criteria))
        self._given = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
        prepared: Any = model.generate(self._given, custom_generate=_prepared, **arguments)
        self._processors = prepared.processors
        self._criteria = prepared.criteria
        self.sampling = bool(prepared.config.do_sample)
        self.servable = prepared.config.get_generation_mode() in _MODES
        self._ends = decoder.end_tokens(arguments)
        self._scope: AbstractContextManager[Any] = seeded(seed, device)
        self._streamer = streamer
        self.ids: list[int] = []
        self.ended = False
        if streamer is not None:
            streamer.put(self._given.cpu())

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is the token."""
        return not self.sampling and not self._processors

    @property
    def sequence(self) -> torch.Tensor:
        """(1, tokens) int64: the prompt and what was generated."""
        return self._given

    def sample(self, logits: torch.Tensor) -> int:
        """The next token.

        Args:
            logits: (vocabulary,) fp32, not changed.
        """
        with self._scope:
            scores = self._processors(self._given, logits.unsqueeze(0).clone())
            if not self.sampling:
                return int(scores.argmax(dim=-1))
            chances = torch.nn.functional.softmax(scores, dim=-1)
            return int(torch.multinomial(chances, num_samples=1))

    def take(self, token: int) -> None:
        """Append a token, and ask the criteria whether it was the last."""
        new = self._given.new_tensor([[token]])
        self.ids.append(token)
        self._given = torch.cat([self._given, new], dim=1)
        if self._streamer is not None:
            self._streamer.put(new[0].cpu())
        # Scores are kept for nobody, as without output_scores.
        self.ended = bool(self._criteria(self._given, None).all())
        if self.ended and self._streamer is not None:
            self._streamer.end()

    def result(self) -> list[int]:
        """The tokens, up to the first that ends a text."""
        end = next(
            (i + 1 for i, token in enumerate(self.ids) if token in self._ends), len(self.ids)
        )
        return self.ids[:end]
