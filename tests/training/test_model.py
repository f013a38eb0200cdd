"""The reader before training."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from training.model import BLOCK_ATTENTION, PATTERNS, frozen_parameters, new_reader
from training.tokens import space_twins


@torch.no_grad()
def positional_attention(model: LlamaForCausalLM, length: int) -> list[float]:
    """Layer 0's attention of each head to its pattern, from the last of `length` tokens."""
    model.set_attn_implementation("eager")
    ids = torch.arange(length)[None] % model.config.vocab_size
    weights = model(ids, output_attentions=True).attentions[0][0]
    last = length - 1
    return [
        float(weights[head, last, last - one.last : last - one.first + 1].sum())
        for head, one in enumerate(PATTERNS)
    ]


@pytest.mark.parametrize("length", [12, 64, 1500])
def test_positional_heads_look_where_claimed(
    tokenizer: PreTrainedTokenizerFast, length: int
) -> None:
    weights = positional_attention(new_reader(tokenizer, 0, layers=2), length)
    assert len(weights) == len(PATTERNS)
    assert min(weights) > 0.88


def test_positional_heads_are_frozen_and_the_rest_is_not(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = new_reader(tokenizer, 0)
    frozen = {id(p) for p in frozen_parameters(model)}
    assert all(p.requires_grad == (id(p) not in frozen) for p in model.parameters())


def test_words_start_near_their_spaced_form(tokenizer: PreTrainedTokenizerFast) -> None:
    table = new_reader(tokenizer, 0).model.embed_tokens.weight.detach()
    twins = torch.tensor(space_twins(tokenizer)[:500])
    difference = table[twins[:, 1]] - table[twins[:, 0]]
    near = (difference - difference.mean(0)).norm(dim=1).mean()
    far = (table[twins[:, 0]] - table[twins[:, 0].roll(1)]).norm(dim=1).mean()
    assert near < far / 3


def test_the_same_seed_gives_the_same_reader(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = new_reader(tokenizer, 4), new_reader(tokenizer, 4)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("length", [5, 128, 300])
def test_block_attention_equals_the_model_s_own(
    tokenizer: PreTrainedTokenizerFast, length: int
) -> None:
    model = new_reader(tokenizer, 0)
    ids = torch.randint(10, 4000, (2, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).expand(2, -1).clone()
    positions[:, length // 2 :] += 100
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions,
    }
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs).logits
        model.set_attn_implementation(BLOCK_ATTENTION)
        found = model(**inputs).logits
    assert torch.allclose(found, expected, atol=1e-4)
