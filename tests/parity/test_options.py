"""Options of generate: behind one window they give what the plain model gives, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rag_windows import PCW, GenerationError, Method, ParallelEnsemble, WindowedLM

from . import engine, zoo
from .cases import Case, case


class Favour(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.linspace(0, 3, scores.shape[-1])


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams, several answers": {"num_beams": 4, "num_return_sequences": 2},
    "beams without a cache": {"num_beams": 2, "use_cache": False},
    "sampling": {"do_sample": True, "top_p": 0.9},
    "sampling, several answers": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "prefill in chunks": {"prefill_chunk_size": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "early exit": {"assistant_early_exit": 1},
    "end token": {"eos_token_id": 50},
    "banned words": {"bad_words_ids": [[5]]},
    "min-p": {"do_sample": True, "min_p": 0.05},
    "beams, length penalty": {"num_beams": 3, "length_penalty": 0.3, "early_stopping": True},
    "logits processor": {"logits_processor": LogitsProcessorList([Favour()])},
    "min new tokens": {"min_new_tokens": 7, "eos_token_id": 50},
    "no repeated bigram": {"no_repeat_ngram_size": 2, "do_sample": True},
    "generation config": {"generation_config": GenerationConfig(top_k=7), "do_sample": True},
}
SEED = 3


FEW = ("greedy", "without a cache", "beams", "sampling", "prompt lookup")
ASKED = [
    *(("llama", option, PCW()) for option in OPTIONS),
    *((name, option, PCW()) for name in ("gemma3_text-sliding", "gpt2") for option in FEW),
]
CASES = [
    *((*asked, windows) for asked in ASKED for windows in ((20,), ())),
    *(("llama", option, ParallelEnsemble(), (20,)) for option in OPTIONS),
]


def ours(
    lm: WindowedLM, one: Case, method: Method, options: dict[str, Any]
) -> list[int] | GenerationError:
    """The generated tokens, or why the engine refuses the options."""
    context = lm.encode_ids(one.prefix, one.windows, method=method)
    seed = SEED if "do_sample" in options else None
    try:
        return lm.generate_ids(context, one.query, max_new_tokens=8, seed=seed, **options)
    except GenerationError as error:
        return error


@pytest.mark.parametrize(("name", "option", "method", "windows"), CASES)
def test_option_is_that_of_transformers(
    name: str, option: str, method: Method, windows: tuple[int, ...]
) -> None:
    """What an option can't do beside windows is refused; it never changes the answer unseen."""
    model, one, options = zoo.shared(name), case(5, windows, 6), OPTIONS[option]
    before = torch.get_rng_state()
    got = ours(engine.shared(name), one, method, options)
    assert torch.equal(torch.get_rng_state(), before), "a seeded call left the global generator"
    if isinstance(got, GenerationError):
        assert any(key in str(got) for key in options)
        return
    torch.manual_seed(SEED)
    plain = model.generate(
        torch.tensor([one.flat]), max_new_tokens=8, **{"do_sample": False, **options}
    )
    assert got == plain[0, len(one.flat) :].tolist()
