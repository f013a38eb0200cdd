"""Texts of unlike length in one call: what CUDA's kernel is handed, by a stand-in on the CPU."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rag_windows import WindowedLM
from rag_windows.attention.backends import Request, reference, varlen
from rag_windows.attention.packed import attend_own
from rag_windows.encoding import Encoder
from tests.parity import zoo

LENGTHS = (7, 3, 7, 1, 12, 3)
EXACT = 1e-5


class Kernel:
    """What PyTorch says of its kernel, as explicit sums over each text.

    Row i of a text sees its keys ``i - left`` to ``i + right``, -1 being no bound, and none behind
    itself where it is causal.

    Attributes:
        calls: how often it ran.
        fault: added to its answers.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.fault = 0.0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_bounds: Tensor,
        key_bounds: Tensor,
        most_rows: int,
        most_keys: int,
        causal: bool,
        scale: float,
        left: int,
        right: int,
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        assert query_bounds.dtype == key_bounds.dtype == torch.int32
        ends = query_bounds.tolist()
        assert ends == key_bounds.tolist()
        assert (ends[0], ends[-1]) == (0, query.shape[0])
        sizes = [b - a for a, b in pairwise(ends)]
        assert most_rows == most_keys == max(sizes)
        output = torch.empty(query.shape[0], query.shape[1], value.shape[-1], dtype=query.dtype)
        lse = torch.empty(query.shape[1], query.shape[0])
        groups = query.shape[1] // key.shape[1]
        for head in range(query.shape[1]):
            for start, size in zip(ends, sizes, strict=False):
                for i in range(size):
                    first = max(0, i - left) if left >= 0 else 0
                    last = min(size - 1, i + right) if right >= 0 else size - 1
                    seen = slice(start + first, start + (min(last, i) if causal else last) + 1)
                    row = query[start + i, head].double()
                    logits = key[seen, head // groups].double() @ row * scale
                    mixed = logits.softmax(0) @ value[seen, head // groups].double()
                    output[start + i, head] = (mixed + self.fault).to(query.dtype)
                    lse[head, start + i] = logits.logsumexp(0)
        return output, lse


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The stand-in, on the CPU and also for fp32; the guard has asked nothing yet."""
    made = Kernel()
    monkeypatch.setattr(varlen, "_flash", made)
    monkeypatch.setattr(varlen, "DEVICE", "cpu")
    monkeypatch.setattr(varlen, "_agrees", varlen._agrees.__wrapped__)
    monkeypatch.setitem(varlen.TOLERANCE, torch.float32, EXACT)
    return made


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(LENGTHS), 8, generator=generator).to(dtype) for heads in (4, 2, 2)
    )
    return query, key, value


@pytest.mark.parametrize("reach", [None, 1, 4, 100])
def test_one_call_for_texts_of_unlike_length(kernel: Kernel, reach: int | None) -> None:
    answers = attend_own(LENGTHS, *tensors(), 0.3, None, reach)
    assert kernel.calls == 2  # the guard's question, and this one
    mask = varlen.same_text(LENGTHS, reach)
    expected = reference.attend(Request(*tensors(), 0.3, mask=mask))
    kernel.calls = 0
    query, key, value = (tensor.double() for tensor in tensors())
    by_length = attend_own(LENGTHS, query, key, value, 0.3, None, reach)
    assert kernel.calls == 0
    for answer, wanted, looped in zip(answers, expected, by_length, strict=True):
        torch.testing.assert_close(answer, wanted, atol=EXACT, rtol=0)
        torch.testing.assert_close(answer.double(), looped.double(), atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding"])
def test_windows_are_the_same_through_both(name: str, request: pytest.FixtureRequest) -> None:
    model = WindowedLM.from_pretrained(zoo.shared(name), tokenizer=None)._plain_encoder.twin
    ids = [zoo.ids(length, number) for number, length in enumerate((3, 11, 24))]

    def windows() -> list[Any]:
        encoder = Encoder(model)
        return encoder.encode_windows(encoder.encode_prefix(zoo.ids(9, 50)), ids)

    before = windows()
    kernel = request.getfixturevalue("kernel")
    after = windows()
    assert kernel.calls > 0
    for one, other in zip(before, after, strict=True):
        for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=EXACT)


def test_what_it_does_not_serve(kernel: Kernel) -> None:
    query, key, value = tensors()
    assert varlen.serves(LENGTHS, query, key, value, None, None)
    assert not varlen.serves((sum(LENGTHS),), query, key, value, None, None)
    assert not varlen.serves(LENGTHS, query, key, value, 2.0, None)
    assert not varlen.serves(LENGTHS, query.double(), key.double(), value.double(), None, None)
    assert not varlen.serves(LENGTHS, query, key, value[..., :4], None, None)
    assert not varlen.serves(LENGTHS, query[..., :6], key[..., :6], value[..., :6], None, None)


@pytest.mark.parametrize("fault", ["wrong", "error"])
def test_a_kernel_that_errs_is_left_out(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    if fault == "error":
        monkeypatch.setattr(varlen, "_flash", refuse)
    kernel.fault = 0.01
    with caplog.at_level(logging.WARNING):
        assert not varlen.serves(LENGTHS, *tensors(), None, None)
    assert "no such kernel" in caplog.text or "differs from the reference" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reach", [None, 4])
def test_on_a_device(dtype: torch.dtype, reach: int | None) -> None:
    query, key, value = (t.cuda() for t in tensors(dtype))
    assert varlen.serves(LENGTHS, query, key, value, None, reach)
    answers = varlen.attend(LENGTHS, query, key, value, 0.3, reach)
    mask = varlen.same_text(LENGTHS, reach).cuda()
    expected = reference.attend(Request(query, key, value, 0.3, mask=mask))
    for answer, wanted in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer.float(), wanted.float(), atol=3e-2, rtol=0)
