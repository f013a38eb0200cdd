"""The rows of a batch: how each gets its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from rag_windows.attention.weights import of_groups
from rag_windows.errors import GenerationError
from rag_windows.generate import Decoder, with_config
from rag_windows.loading import input_device
from rag_windows.prefill import EncodedContext
from rag_windows.sampling import refuse_model_inputs, seeded
from rag_windows.steps.packed_rows import FedRow

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

    def attention(self) -> list[list[float]] | None:
        """Of each token, attention of the citation groups, the prefix and the row's own tokens.

        None if it was not recorded. Only shares mean something.
        """
        if not self.cited or self._span_groups is None or not self.weights:
            return None
        weights: list[list[float]] = of_groups(torch.cat(self.weights), self._span_groups).tolist()
        return weights
