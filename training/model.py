"""The reader before training: a small Llama whose first layer looks at fixed distances.

The four heads of layer 0 attend to the tokens 1, 2, 3-4 and 5-8 back. Their query and key weights
are zero, their biases make the pattern, all four stay frozen; from there a model binds values to
names within minutes, without it such a model stays blind to names for hours. Layer 1 starts with
equal query and key weights. Words that differ only by the space before them start from nearly the
same embedding. All of this stands in the model card.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.tokens import space_twins

HEADS, HEAD_SIZE = 4, 64
ROPE_THETA = 1e6
MATCHING_LAYER = 1
EMBEDDING_STD, TWIN_STD = 0.05, 0.01


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a positional head looks at: the tokens `first` to `last` back.

    The first three rotary pairs have the amplitude `near` (it decides how sharp the pattern is),
    those up to `pairs` the amplitude `far` (it keeps distant tokens out).
    """

    first: int
    last: int
    near: float
    far: float
    pairs: int

    def biases(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(query bias, key bias), each (HEAD_SIZE,): rotated, their product peaks here."""
        half, pairs = HEAD_SIZE // 2, self.pairs
        speeds = ROPE_THETA ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = (self.first + self.last) / 2 * speeds[:pairs]
        amplitude = torch.full((pairs,), self.far, dtype=torch.float64)
        amplitude[:3] = self.near
        query, key = torch.zeros(HEAD_SIZE), torch.zeros(HEAD_SIZE)
        key[:pairs] = amplitude.float()
        query[:pairs] = (amplitude * turn.cos()).float()
        query[half : half + pairs] = (-amplitude * turn.sin()).float()
        return query, key


PATTERNS = (
    Pattern(1, 1, 6.0, 6.0, 8),
    Pattern(2, 2, 6.0, 6.0, 8),
    Pattern(3, 4, 6.0, 6.0, 10),
    Pattern(5, 8, 1.5, 5.0, 10),
)


def frozen_parameters(model: LlamaForCausalLM) -> list[nn.Parameter]:
    """The four tensors of layer 0 that make its pattern and are never trained."""
    own = model.model.layers[0].self_attn
    return [own.q_proj.weight, own.q_proj.bias, own.k_proj.weight, own.k_proj.bias]


@torch.no_grad()
def _prepare(model: LlamaForCausalLM, twins: Iterable[tuple[int, int]]) -> None:
    """Sets the positional heads, the matching heads, and the embeddings."""
    attention = model.model.layers[0].self_attn
    queries, keys = zip(*(pattern.biases() for pattern in PATTERNS), strict=True)
    for projection, biases in ((attention.q_proj, queries), (attention.k_proj, keys)):
        projection.weight.zero_()
        projection.bias.copy_(torch.cat(biases))
    # One map for all heads, so that a word looks the same from whatever distance it is seen: what a
    # question gathers can be compared with what a statement gathered from the first step on.
    value = nn.init.orthogonal_(torch.empty(HEAD_SIZE, model.config.hidden_size))
    output = nn.init.orthogonal_(torch.empty(model.config.hidden_size, HEAD_SIZE))
    attention.v_proj.weight.copy_(value.repeat(HEADS, 1))
    scaled = [output * (pattern.last - pattern.first + 1) ** 0.5 for pattern in PATTERNS]
    attention.o_proj.weight.copy_(torch.cat(scaled, dim=1))
    # Equal query and key weights: a token attends to tokens like itself.
    matching = model.model.layers[MATCHING_LAYER].self_attn
    own = zip(
        matching.q_proj.weight.split(HEAD_SIZE),
        matching.k_proj.weight.split(HEAD_SIZE),
        strict=True,
    )
    for query, key in own:
        nn.init.orthogonal_(query)
        key.copy_(query)
    # A word with a space before it = the bare word + one shared vector.
    table = model.model.embed_tokens.weight
    table.normal_(0, EMBEDDING_STD)
    space = torch.randn(table.shape[1]) * EMBEDDING_STD
    for bare, spaced in twins:
        table[spaced] = table[bare] + space + torch.randn(table.shape[1]) * TWIN_STD


def new_reader(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """An untrained reader, fp32, reproducible from the seed, its positional heads frozen.

    A Llama with biases on query, key, value and output, and tied embeddings.
    """
    torch.manual_seed(seed)
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attention_dropout=0.0,
        **tokens,
    )
    model = LlamaForCausalLM(config)
    _prepare(model, space_twins(tokenizer))
    model.generation_config.update(**tokens)
    for parameter in frozen_parameters(model):
        parameter.requires_grad_(False)
    return model


@torch.no_grad()
def start_from(model: LlamaForCausalLM, folder: Path) -> None:
    """Puts the weights of a model folder into `model`, whose shapes they must have.

    The frozen queries and keys stay the model's own: in a shipped folder they are rounded to fp16.
    """
    kept = [parameter.clone() for parameter in frozen_parameters(model)]
    trained = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(trained.state_dict())
    for parameter, own in zip(frozen_parameters(model), kept, strict=True):
        parameter.copy_(own)
