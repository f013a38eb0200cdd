"""The compiled kernel with numbers that are large, equal, infinite, or none at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rag_windows.attention.backends import Request, reference
from rag_windows.attention.native.kernel import Item, Items, call

from .asking import (
    LSE_TOLERANCE,
    NEEDS_COMPILER,
    OUTPUT_TOLERANCE,
    SMALL,
    Kind,
    draw,
    exact,
    reading,
    segment,
)

pytestmark = NEEDS_COMPILER
EACH = pytest.mark.parametrize("kind", SMALL, ids=str)
# As few, and as many.
ROWS = pytest.mark.parametrize("rows", [3, 40])
CAPS = pytest.mark.parametrize("softcap", [None, 5.0])


def by_reference(one: Item, query: Tensor) -> tuple[Tensor, Tensor]:
    """Answers of the specification of every backend."""
    key, value = one.segments[0]
    output, lse = reference.attend(
        Request(
            query[list(one.tokens)].transpose(0, 1).unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            one.scale,
            one.temperature,
            one.softcap,
        )
    )
    return output[0].transpose(0, 1), lse[0].transpose(0, 1)


@EACH
@ROWS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_logits(kind: Kind, rows: int, sign: float) -> None:
    """About 10,000 and above, all of one sign or of both: only differences may be raised."""
    dtype, dim, _ = kind
    key, value = segment(kind, 2, 600)
    query = draw(dtype, rows, 4, dim)
    for keys, asking in ((key, query), (sign * key.abs(), query.abs())):
        one = reading([(keys, value)], range(rows), 2000.0)
        output, lse = call(Items([one]), asking)
        _, expected = exact([one], asking)
        assert bool((expected.abs() > 10000).any())
        assert bool(torch.isfinite(output).all())
        torch.testing.assert_close(lse.double(), expected, rtol=2e-6, atol=1e-2)


@EACH
@ROWS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_logits_that_are_capped(kind: Kind, rows: int, sign: float) -> None:
    """Nearly all of them at the cap, far beyond what can be raised."""
    dtype, dim, _ = kind
    key, value = segment(kind, 2, 600)
    query = draw(dtype, rows, 4, dim)
    one = reading([(key, value)], range(rows), sign * 2000.0, 5.0, 0.5)
    output, lse = call(Items([one]), query)
    expected, expected_lse = exact([one], query)
    tolerance = OUTPUT_TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=LSE_TOLERANCE, rtol=1e-6)


@EACH
@ROWS
@CAPS
def test_a_single_key(kind: Kind, rows: int, softcap: float | None) -> None:
    """Its value, to the bit."""
    dtype, dim, _ = kind
    key, value = segment(kind, 2, 1)
    query = draw(dtype, rows, 4, dim)
    one = reading([(key, value)], range(rows), 0.3, softcap)
    output, lse = call(Items([one]), query)
    assert torch.equal(output, value.repeat_interleave(2, 0).transpose(0, 1).expand(rows, -1, -1))
    torch.testing.assert_close(lse.double(), exact([one], query)[1], atol=LSE_TOLERANCE, rtol=1e-6)


@EACH
@ROWS
@CAPS
@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_stays_where_it_is_read(
    kind: Kind, rows: int, softcap: float | None, where: str
) -> None:
    """In the rows of its kv head and its reading; of a value, in its dimension."""
    dtype, dim, _ = kind
    query = draw(dtype, rows, 4, dim)
    for place in (0, 299, 300, 599):
        key, value = segment(kind, 2, 600)
        (key if where == "key" else value)[1, place, 3] = torch.nan
        other = segment(kind, 2, 400, seed=1)
        readings = [
            reading([(key, value)], range(rows), 0.3, softcap),
            reading([other], range(rows), 0.3, softcap),
        ]
        output, lse = call(Items(readings), query)
        expected = torch.zeros_like(output, dtype=torch.bool)
        expected[:rows, 2:, slice(None) if where == "key" else 3] = True
        assert torch.equal(output.isnan(), expected)
        expected_lse = torch.zeros_like(lse, dtype=torch.bool)
        expected_lse[:rows, 2:] = where == "key"
        assert torch.equal(lse.isnan(), expected_lse)


@EACH
@ROWS
@CAPS
def test_nan_of_a_key_is_not_seen_before_it(kind: Kind, rows: int, softcap: float | None) -> None:
    dtype, dim, _ = kind
    query = draw(dtype, 2 * rows, 4, dim)
    place = rows // 2
    texts = [segment(kind, 2, rows, seed=seed) for seed in range(2)]
    texts[0][0][1, place, 3] = torch.nan
    texts[0][1][1, rows - 1, 5] = torch.nan
    tokens = range(rows), range(rows, 2 * rows)
    readings = [
        reading([text], which, 0.3, softcap, causal=True)
        for text, which in zip(texts, tokens, strict=True)
    ]
    output, lse = call(Items(readings), query)
    expected = torch.zeros_like(lse, dtype=torch.bool)
    expected[place:rows, 2:] = True
    assert torch.equal(lse.isnan(), expected)
    # A value that weighs 0 may still make its dimension NaN, of its own text alone.
    output[:rows, 2:, 5] = 0.0
    expected = expected.unsqueeze(-1).repeat(1, 1, output.shape[-1])
    expected[:rows, 2:, 5] = False
    assert torch.equal(output.isnan(), expected)


@EACH
@ROWS
@pytest.mark.parametrize("number", [torch.inf, -torch.inf])
def test_infinite_values(kind: Kind, rows: int, number: float) -> None:
    """As in the reference; with the opposite beside it, NaN."""
    dtype, dim, _ = kind
    key, value = segment(kind, 2, 300)
    value[0, 17, 3] = number
    value[0, 290, 3] = number
    value[1, 5, 0] = number
    value[1, 280, 0] = -number
    query = draw(dtype, rows, 4, dim)
    one = reading([(key, value)], range(rows), 0.1)
    output, lse = call(Items([one]), query)
    expected, expected_lse = by_reference(one, query)
    assert bool(expected.isinf().any())
    assert bool(expected.isnan().any())
    tolerance = OUTPUT_TOLERANCE[dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, atol=LSE_TOLERANCE, rtol=1e-6)


@EACH
@ROWS
@pytest.mark.parametrize("hidden", [range(5), range(256), range(256, 600), range(600)])
def test_keys_that_weigh_nothing(kind: Kind, rows: int, hidden: range) -> None:
    """Logits of -inf, also in whole chunks, and of all keys: then zero, and no NaN."""
    dtype, dim, _ = kind
    key, value = segment(kind, 1, 600)
    key[0, list(hidden), 0] = -torch.inf
    query = draw(dtype, rows, 2, dim)
    query[..., 0] = 1.0
    one = reading([(key, value)], range(rows))
    output, lse = call(Items([one]), query)
    expected, expected_lse = by_reference(one, query)
    assert not bool(expected.isnan().any())
    tolerance = OUTPUT_TOLERANCE[dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=LSE_TOLERANCE, rtol=1e-6)


@EACH
@ROWS
@pytest.mark.parametrize("size", [0.0, 1e4, -1e4])
def test_equal_logits(kind: Kind, rows: int, size: float) -> None:
    """The mean of the values; the lse is the logit and the logarithm of the number of keys."""
    dtype, dim, _ = kind
    key, value = segment(kind, 2, 700)
    key = torch.ones_like(key)
    query = torch.ones(rows, 4, dim, dtype=dtype)
    output, lse = call(Items([reading([(key, value)], range(rows), size / dim)]), query)
    tolerance = OUTPUT_TOLERANCE[dtype]
    mean = value.double().mean(1).repeat_interleave(2, 0).expand(rows, -1, -1)
    torch.testing.assert_close(output.double(), mean, atol=tolerance, rtol=tolerance)
    expected = torch.full_like(lse, size) + torch.tensor(700.0).log()
    torch.testing.assert_close(lse, expected, atol=LSE_TOLERANCE, rtol=2e-7)


@ROWS
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00001, 0x7FFFFFFF, -1, -0x400000 + 0xFF])
def test_every_nan_is_one(rows: int, bits: int) -> None:
    """Whatever its other bits are."""
    key, value = segment(SMALL[0], 1, 40)
    key.view(torch.int32)[0, 7, 2] = bits
    assert bool(key[0, 7, 2].isnan())
    query = draw(torch.float32, rows, 1, 16)
    output, lse = call(Items([reading([(key, value)], range(rows))]), query)
    assert bool(output.isnan().all())
    assert bool(lse.isnan().all())


@EACH
@ROWS
def test_a_logit_of_infinity_is_no_number(kind: Kind, rows: int) -> None:
    dtype, dim, _ = kind
    key, value = segment(kind, 1, 600)
    key[0, 300, 0] = torch.inf
    query = draw(dtype, rows, 2, dim)
    query[..., 0] = 1.0
    one = reading([(key, value)], range(rows))
    assert bool(call(Items([one]), query)[0].isnan().all())
    assert bool(by_reference(one, query)[0].isnan().all())


@pytest.mark.parametrize("kind", SMALL[1:], ids=str)
def test_values_as_large_as_the_dtype_holds(kind: Kind) -> None:
    dtype, dim, _ = kind
    key, value = segment(kind, 1, 300)
    value = torch.full_like(value, torch.finfo(dtype).max)
    output, _ = call(Items([reading([(key, value)])]), draw(dtype, 1, 1, dim))
    # The sum may be one rounding above the largest number.
    assert bool((output >= 0.99 * torch.finfo(dtype).max).all())
    assert not bool(output.isnan().any())
