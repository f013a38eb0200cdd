"""Moving keys, and the paged buffers that they are read from and written to."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rag_windows import UnsupportedModelError
from vllm_rag_windows.paged import PagedLayers
from vllm_rag_windows.prompts import WindowedPrompt
from vllm_rag_windows.support import frequencies, moved

WIDTH = 16
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def config(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=1024,
        rope_parameters=dict(rope),
    )


@pytest.mark.parametrize("name", ROPES)
def test_moved_keys_are_those_that_transformers_rotates_there(name: str) -> None:
    keys = torch.randn(1, 2, 7, WIDTH)
    embedding = LlamaRotaryEmbedding(config(ROPES[name]))

    def rotated(first: int) -> torch.Tensor:
        positions = torch.arange(first, first + 7).unsqueeze(0)
        return apply_rotary_pos_emb(keys, keys, *embedding(keys, positions))[1]

    angles = frequencies(config(ROPES[name]))
    for first, on in ((0, 90), (13, 0), (40, 301)):
        torch.testing.assert_close(
            moved(rotated(first), on, angles), rotated(first + on), atol=2e-5, rtol=1e-4
        )


@given(
    prefix=st.integers(0, 5),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    temperature=st.floats(0.2, 2.0),
)
def test_plain_attention_over_moved_keys_is_that_over_windows(
    prefix: int, lengths: list[int], temperature: float
) -> None:
    """The algebra, in float64: one softmax over prefix, all windows, and the query itself."""
    angles = frequencies(config(ROPES["default"]))

    def at(rows: torch.Tensor, positions: list[int]) -> torch.Tensor:
        turned = torch.tensor(positions, dtype=torch.float64).unsqueeze(1) * angles
        first, second = rows.chunk(2, dim=-1)
        cos, sin = turned.cos(), turned.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    torch.manual_seed(prefix)
    total = prefix + sum(lengths)
    rows, query = torch.randn(total, WIDTH).double(), torch.randn(1, WIDTH).double()
    places = [*range(prefix)]
    places += [prefix + place for length in lengths for place in range(length)]
    behind = prefix + max(lengths)
    divide = torch.ones(total, 1, dtype=torch.float64)
    divide[prefix:] = temperature
    expected = at(query, [behind]) @ at(rows, places).T / divide.T
    ids = tuple(range(total + 1))
    prompt = WindowedPrompt.of({"prefix": prefix, "windows": lengths}, ids)
    assert prompt is not None
    on = [place + prompt.rotation for place in places]
    got = at(query, [prompt.read_tokens]) @ (at(rows, on) / divide).T
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


def test_embeddings_that_depend_on_the_length_are_refused() -> None:
    for kind in ("dynamic", "longrope"):
        given_config = SimpleNamespace(
            model_type="llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4}
        )
        with pytest.raises(UnsupportedModelError, match=kind):
            frequencies(given_config)
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        frequencies(SimpleNamespace(model_type="gpt2"))


class Layer:
    """Stands in for an attention layer of vLLM: blocks whose content is shuffled by a backend."""

    def __init__(self, heads: int, kernel: int, blocks: int, seed: int, keeps: bool = True) -> None:
        self.head_size, self.impl = WIDTH, self
        self.kv_cache = torch.full((blocks, heads, kernel, 2 * WIDTH), math.nan)
        order = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(self.kv_cache[0].numel(), generator=order)
        self._keeps = keeps

    def do_kv_cache_update(
        self, layer: Layer, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any
    ) -> None:
        _, heads, kernel, _ = cache.shape
        for row, slot in enumerate(slots.tolist()):
            block = cache[slot // kernel].view(-1)
            places = self._order.view(2, kernel, heads, WIDTH)[:, slot % kernel]
            block[places] = torch.stack([key[row], value[row]]) * (1.0 if self._keeps else 0.5)


@pytest.mark.parametrize("kernel", [4, 8])
def test_tokens_are_read_and_written_in_whatever_order_a_backend_keeps_them(kernel: int) -> None:
    layers = [Layer(3, kernel, 8 * 8 // kernel, seed=5) for _ in range(2)]
    paged = PagedLayers(layers, block_tokens=8)
    assert (paged.count, paged.heads, paged.width) == (2, 3, WIDTH)
    blocks = [6, 2, 5]
    written = torch.randn(2, 2, 3, 22, WIDTH)
    for layer in range(2):
        for first, last in ((0, 3), (3, 22)):
            paged.write(layer, blocks, first, *written[layer][:, :, first:last])
    for count in (22, 16, 5, 1):
        found = paged.read(blocks, count)
        for layer in range(2):
            torch.testing.assert_close(found[layer], written[layer][:, :, :count], atol=0, rtol=0)
    untouched = [number for number in range(1, 8) if number not in blocks]
    parts = 8 // kernel
    for number in untouched:
        assert layers[0].kv_cache[number * parts : (number + 1) * parts].isnan().all()


def test_a_buffer_that_changes_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="number by number"):
        PagedLayers([Layer(1, 4, 2, seed=0, keeps=False)], block_tokens=4)
    with pytest.raises(UnsupportedModelError, match="differ"):
        PagedLayers([Layer(1, 4, 2, seed=0), Layer(2, 4, 2, seed=0)], block_tokens=4)
