"""Windows in 8 bits a number that are read as they are stored, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import CacheError, PassageCache, WindowedLM, kv
from rag_windows.attention import backends, native_kernel
from rag_windows.cache.codec import INT8, Stored, decode, encode, settle
from rag_windows.interchange import Window
from rag_windows.kv import Windows
from rag_windows.steps.query_attention import AttentionLayout, attention_paid
from tests.rag_windows import small
from tests.rag_windows.attention import stand_in

QUESTION = "Where is the mill?"
PASSAGES = [
    "The mill is in Norby, behind the church.",
    "Old Alda keeps goats on the hill.",
    "A road leads from the harbour to the mill; it is steep and wet.",
    "Norby has three streets.",
]
METHODS = (
    *("ape", "pcw", "structured-prompting", "mateicl", "aligned:tokens=64+pcw", "sink+pcw"),
    *("linked", "linked:choose=last", "deep-thinking+pcw", "neighbours+pcw"),
    *("codebook:retrieve=3", "query-likelihood:retrieve=2", "pced", "ensemble", "auto"),
)


@cache
def of_dtype(dtype: torch.dtype) -> Any:
    """A model whose heads the kernel is made for."""
    return small.build(hidden_size=64).to(dtype)


def reader(dtype: torch.dtype = torch.float32, **sizes: Any) -> WindowedLM:
    cached = PassageCache(store=INT8, **(sizes or {"memory": "64MiB"}))
    return WindowedLM(of_dtype(dtype), small.tokenizer(), cache=cached)


def scores(lm: WindowedLM, method: str) -> list[float]:
    made = lm.score(QUESTION, PASSAGES, ["Norby", "the hill"], method=method)
    return [one.logprob for one in made]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", ["native", "cpu"])
def test_methods_read_the_same_by_all_backends(method: str, backend: str) -> None:
    lm = reader()
    with stand_in.forced("reference"):
        expected = scores(lm, method)
    with stand_in.forced(backend):
        assert scores(lm, method) == pytest.approx(expected, abs=2e-3)
    plain = WindowedLM(of_dtype(torch.float32), small.tokenizer())
    assert scores(lm, method) == pytest.approx(scores(plain, method), rel=0.03)


@pytest.mark.parametrize("method", ["linked:choose=query", "linked:choose=last"])
def test_attention_to_tokens_is_that_of_what_is_read(method: str) -> None:
    decoder = reader().engine.decoder
    request = small.request(reader(), QUESTION, PASSAGES, method=method)
    context = request.encode()
    assert all(one.packed is not None for one in context.each)
    whole = replace(
        context,
        windows=Windows.of([one.holding(one.tensors) for one in context.each], range(4), 4),
    )
    found = [
        attention_paid(one, request.parts.query_ids, decoder.runner, layout)
        for one in (context, whole)
        if isinstance(layout := decoder.layout(one, kind=AttentionLayout), AttentionLayout)
    ]
    torch.testing.assert_close(*found, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cold_and_warm_answers_are_the_same(dtype: torch.dtype) -> None:
    lm = reader(dtype)
    cold = lm.generate(QUESTION, PASSAGES, max_new_tokens=12, method="pcw")
    warm = lm.generate(QUESTION, PASSAGES, max_new_tokens=12, method="pcw")
    assert (cold.usage.cached_windows, warm.usage.cached_windows) == (0, len(PASSAGES))
    assert warm.token_ids == cold.token_ids
    assert warm.citations == cold.citations


def test_further_tokens_unpack_nothing_where_the_kernel_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one may, on a processor whose kernel is made for few rows alone."""
    lm, made = reader(torch.bfloat16), [0]
    real = kv.unpacked

    def counted(*given: Any) -> torch.Tensor:
        made[0] += 1
        return real(*given)

    def unpackings(tokens: int) -> int:
        before = made[0]
        wanted: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        lm.generate(QUESTION, PASSAGES, method="pcw", do_sample=False, **wanted)
        return made[0] - before

    unpackings(1)
    monkeypatch.setattr(backends, "unpacked", counted)
    monkeypatch.setattr(kv, "unpacked", counted)
    further = unpackings(6) - unpackings(2)
    assert (further == 0) == (native_kernel(torch.bfloat16, 16, 16, packed=True) is not None)


def addresses(window: Window) -> list[int]:
    """Where a packed window's numbers are."""
    assert window.packed is not None
    return [numbers.data_ptr() for numbers, *_ in window.packed.groups]


def test_memory_holds_them_once(tmp_path: Path) -> None:
    sizes = {"memory": "64MiB", "disk": "64MiB", "path": tmp_path}
    lm = reader(torch.bfloat16, **sizes)
    contexts = [small.request(lm, QUESTION, PASSAGES, method="pcw").encode() for _ in "ab"]
    cold, warm = (context.each for context in contexts)
    for one, other in zip(cold, warm, strict=True):
        assert one.packed is not None
        assert other.packed is not None
        assert one.nbytes < 0.8 * sum(tensor.nbytes for tensor in one.tensors)
        assert all(map(torch.equal, one.tensors, other.tensors))
    again = small.request(lm, QUESTION, PASSAGES, method="pcw").encode().each
    assert [*map(addresses, warm)] == [*map(addresses, again)]
    assert lm.cache is not None
    lm.cache.flush()
    later = reader(torch.bfloat16, memory=None, disk="64MiB", path=tmp_path)
    read = small.request(later, QUESTION, PASSAGES, method="pcw").encode()
    assert read.cached_tokens > 0
    for one, found in zip(warm, read.each, strict=True):
        assert found.packed is not None
        assert all(map(torch.equal, one.tensors, found.tensors))


def window(*widths: int, dtype: torch.dtype = torch.bfloat16) -> Window:
    """Layers of these widths, whose values are twice as wide."""
    draw = torch.Generator().manual_seed(1)
    keys = tuple(torch.randn(2, 5, width, generator=draw).to(dtype) for width in widths)
    values = tuple(torch.randn(2, 5, 2 * width, generator=draw).to(dtype) for width in widths)
    return Window((1, 2, 3, 4, 5), 3, keys, values)


@pytest.mark.parametrize("widths", [(16,), (16, 16), (16, 32, 16)])
def test_a_window_comes_back_layer_by_layer(widths: tuple[int, ...]) -> None:
    whole = window(*widths)
    made = settle(INT8, whole)
    assert made.packed is not None
    assert len(made.keys) == len(made.values) == len(widths)
    for one, found in zip(whole.tensors, made.tensors, strict=True):
        assert found.dtype == one.dtype
        assert (one - found).abs().max() <= one.abs().max() / 127
    assert [one.shape for one in made.keys[:1]] == [whole.keys[0].shape]
    assert made.keys[-1].equal(made.tensors[len(widths) - 1])
    again = encode(INT8, made)
    assert all(map(torch.equal, again.tensors, encode(INT8, whole).tensors))
    assert again.description == encode(INT8, whole).description


HOSTILE: dict[str, Any] = {
    "a group twice": {"groups": [[0, 0], [1, 1]]},
    "a layer that is not there": {"groups": [[0, 7], [2, 3]]},
    "too few groups": {"groups": [[0, 1]]},
    "no list": {"groups": 3},
    "another dtype": {"dtypes": ["int64", "int64"]},
    "no dtype": {"dtypes": ["nn", "nn"]},
    "more layers": {"layers": 3},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_can_t_be_right_is_an_error(what: str) -> None:
    stored = encode(INT8, window(16, 16))
    about = {**stored.description, **HOSTILE[what]}
    with pytest.raises(CacheError):
        decode(INT8, Stored(stored.tensors, about), (1, 2, 3, 4, 5), 3)


def test_numbers_of_other_shapes_are_an_error() -> None:
    stored = encode(INT8, window(16, 16))
    numbers, peaks, *others = stored.tensors
    for wrong in ((numbers[:, :, :4], peaks), (numbers[:1], peaks), (numbers[0], peaks[0])):
        with pytest.raises(CacheError):
            decode(INT8, Stored((*wrong, *others), stored.description), (1, 2, 3, 4, 5), 3)
