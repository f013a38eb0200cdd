"""Models whose rotary tables change with the length of a call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rag_windows import PCW, LimitError, WindowedLM
from tests.rag_windows import small

POSITIONS = 48


def dynamic_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=262, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=POSITIONS, initializer_range=0.2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_threads_do_not_meet_in_the_tables() -> None:
    model = dynamic_model()
    lm = WindowedLM.from_pretrained(model, method=PCW())
    lengths = [5, 30, 20, 36, 10, 25] * 4

    def answer(length: int) -> list[int]:
        context = lm.encode_ids([1, 2], [list(range(3, 3 + length)), [7, 8]])
        # The plain model's own long prompts rewrite the plain model's tables, not ours.
        model(torch.arange(3, 3 + 2 * length)[None])
        return lm.generate_ids(context, [4, 5], max_new_tokens=6)

    serial = [answer(length) for length in lengths]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, lengths)) == serial


def test_positions_past_the_tables_are_refused() -> None:
    lm = WindowedLM.from_pretrained(dynamic_model(), tokenizer=small.tokenizer())
    with pytest.raises(LimitError, match="49 positions, and from 48 on"):
        lm.encode_ids([1, 2], [list(range(3, 50))])
    context = lm.encode_ids([1, 2], [list(range(3, 43))])
    with pytest.raises(LimitError, match="smaller max_window_tokens"):
        lm.logits(context, [4] * 7)
    with pytest.raises(LimitError, match="50 positions"):
        lm.generate_ids(context, [4, 5], max_new_tokens=6)
    assert len(lm.generate_ids(context, [4, 5], max_new_tokens=4, min_new_tokens=4)) == 4
    with pytest.raises(LimitError, match="no passage would fit"):
        lm.generate("What?", ["One."], max_new_tokens=40)
