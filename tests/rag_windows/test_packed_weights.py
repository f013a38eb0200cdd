"""Packed layers: products as of the unpacked weights, by the kernel and without it."""

from collections.abc import Sequence

import pytest
import torch

from rag_windows.packed_weights import MOST_ROWS, Int8Embedding, Int8Linear, pack, quantized

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def packed(module: torch.nn.Module) -> torch.nn.Module:
    holder = torch.nn.Sequential(module)
    pack(holder)
    return holder[0]


def drawn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ins", [32, 48, 75, 96])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_unpacked_weights(
    dtype: torch.dtype, ins: int, bias: bool
) -> None:
    plain = torch.nn.Linear(ins, 13, bias=bias, dtype=dtype)
    layer = packed(plain)
    assert type(layer) is Int8Linear
    weight = layer.weight.double() * layer.scale.double()[:, None]
    peak = plain.weight.detach().double().abs().amax(dim=1, keepdim=True)
    assert bool(((weight - plain.weight.detach().double()).abs() <= peak / 127).all())
    shapes: Sequence[tuple[int, ...]] = [(1,), (2, 3), (MOST_ROWS,), (MOST_ROWS + 1,), (0,)]
    for shape in shapes:
        asked = drawn(*shape, ins, dtype=dtype)
        with torch.inference_mode():
            found = layer(asked)
        expected = torch.nn.functional.linear(
            asked.double(), weight, None if plain.bias is None else plain.bias.detach().double()
        )
        assert found.shape == (*shape, 13)
        assert found.dtype == dtype
        limit = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) if len(expected) else 1.0)
        assert torch.allclose(found.double(), expected, atol=limit)


def test_rows_that_are_cut_out_of_others_are_read_right() -> None:
    layer = packed(torch.nn.Linear(64, 8, bias=False))
    whole = drawn(4, 128)
    with torch.inference_mode():
        assert torch.equal(layer(whole[:, 64:]), layer(whole[:, 64:].contiguous()))


def test_many_rows_are_multiplied_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, asked = packed(torch.nn.Linear(64, 100)), drawn(40, 64)
    with torch.inference_mode():
        expected = layer(asked)
        monkeypatch.setattr("rag_windows.packed_weights._PIECE", 64 * 7)
        assert torch.allclose(layer(asked), expected, atol=1e-6)


def test_a_processor_without_16_bit_products_multiplies_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, asked = packed(torch.nn.Linear(64, 8, dtype=torch.bfloat16)), drawn(40, 64)
    with torch.inference_mode():
        expected = layer(asked.bfloat16())
        monkeypatch.setattr("rag_windows.packed_weights._product_dtype", lambda _: torch.float32)
        found = layer(asked.bfloat16())
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found, expected, atol=2e-2)


def test_an_embedding_gives_the_rows_and_a_head_shares_them() -> None:
    embedding, head = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleList([embedding, head])
    pack(model)
    rows, products = model
    assert isinstance(rows, Int8Embedding)
    assert rows.weight is products.weight
    assert rows.scale is products.scale
    found = rows(torch.tensor([[3, 7]]))
    assert found.shape == (1, 2, 32)
    assert torch.allclose(found[0], embedding.weight[[3, 7]], atol=0.03)


def test_layers_that_are_more_than_a_product_stay_as_they_are() -> None:
    class Scaled(torch.nn.Linear):
        pass

    assert type(packed(Scaled(32, 8))) is Scaled


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_zeros_and_of_tiny_numbers_become_zeros(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [1.0, -0.5]])
    numbers, scale = quantized(rows, dtype)
    assert numbers[:2].float().mul(scale[:2, None]).abs().max() < 1e-30
    assert numbers[2].tolist() in ([127, -64], [127, -63], [126, -63])
