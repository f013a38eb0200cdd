"""Models whose rotary tables change with the length of a call, under threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rag_windows import PCW, WindowedLM


def dynamic_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_calls_take_turns_where_a_call_rewrites_the_tables() -> None:
    lm = WindowedLM.from_pretrained(dynamic_model(), method=PCW())
    lengths = [5, 60, 20, 90, 10, 40] * 4

    def answer(length: int) -> list[int]:
        context = lm.encode_ids([1, 2], [list(range(3, 3 + length)), [7, 8]])
        return lm.generate_ids(context, [4, 5], max_new_tokens=6)

    serial = [answer(length) for length in lengths]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, lengths)) == serial
