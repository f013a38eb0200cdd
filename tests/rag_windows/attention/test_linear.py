"""Linear layers of few rows: the kernel's numbers, what it leaves to PyTorch, what reaches it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear as by_pytorch
from transformers import LlamaForCausalLM

from rag_windows import PassageCache, WindowedLM
from rag_windows.attention.native import build, linear

from ..small import build as small_model
from .test_kernel import before_a_wall, draw

DTYPES = tuple(build.ELEMENTS)
EACH = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """There is a kernel, and nobody needs gradients; threads are as many as before."""
    if linear.kernel(torch.float32) is None:
        pytest.skip("needs a C compiler, and PyTorch with OpenMP")
    before = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def near(output: Tensor | None, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Sums are of fp32, and rounded once."""
    assert output is not None
    assert output.dtype == input.dtype
    exact = by_pytorch(input.double(), weight.double(), None if bias is None else bias.double())
    size = by_pytorch(input.double().abs(), weight.double().abs())
    size += 0 if bias is None else bias.double().abs()
    rounding = torch.finfo(input.dtype).eps / 2 * exact.abs()
    summing = weight.shape[1] * torch.finfo(torch.float32).eps * size
    smallest = torch.finfo(input.dtype).smallest_normal
    assert ((output.double() - exact).abs() <= 1.01 * rounding + summing + smallest).all()


@pytest.mark.slow
@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, linear.MOST_PAIRED_ROWS),
    outs=st.integers(1, 70),
    ins=st.integers(1, 200),
    biased=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_sizes(
    dtype: torch.dtype, rows: int, outs: int, ins: int, biased: bool, threads: int, seed: int
) -> None:
    torch.set_num_threads(threads)
    made = linear.kernel(dtype)
    rows = min(rows, made.most_rows) if made is not None else rows
    input, weight = draw(dtype, rows, ins, seed=seed), draw(dtype, outs, ins, seed=seed + 1)
    bias = draw(dtype, outs, seed=seed + 2) if biased else None
    whole = linear.product(input, weight, bias)
    near(whole, input, weight, bias)
    assert whole is not None
    # A row's numbers do not depend on the others, nor on the number of threads.
    torch.set_num_threads(1)
    alone = [linear.product(row, weight, bias) for row in input]
    assert torch.equal(torch.stack([one for one in alone if one is not None]), whole)


@EACH
@pytest.mark.parametrize("ins", [1, 31, 32, 75])
def test_nothing_is_read_behind_a_tensor(dtype: torch.dtype, ins: int) -> None:
    input, weight, bias = map(
        before_a_wall, (draw(dtype, 3, ins), draw(dtype, 5, ins, seed=1), draw(dtype, 5, seed=2))
    )
    near(linear.product(input, weight, bias), input, weight, bias)


@EACH
def test_it_errs_no_more_than_pytorch(dtype: torch.dtype) -> None:
    input, weight = draw(dtype, 1, 1024), draw(dtype, 512, 1024, seed=1)
    exact = by_pytorch(input.double(), weight.double())
    made = linear.product(input, weight, None)
    assert made is not None
    errors = [(one.double() - exact).square().mean() for one in (made, by_pytorch(input, weight))]
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(24, 33, 70), (100, 7, 200), (31, 300, 8)])
def test_many_rows_in_fp32(
    dtype: torch.dtype, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor has no product of them, in parts of few weights."""
    monkeypatch.setattr(linear, "_without_product", lambda dtype: dtype != torch.float32)
    rows, outs, ins = sizes
    input, weight, bias = (draw(dtype, *size) for size in ((rows, ins), (outs, ins), (outs,)))
    near(linear.product_in_fp32(input, weight, bias), input, weight, bias)
    near(linear.product_in_fp32(input, weight, None), input, weight, None)
    monkeypatch.setattr(linear, "MOST_WEIGHTS", 3 * ins)
    near(linear.product_in_fp32(input, weight, bias), input, weight, bias)
    module = linear.Linear(ins, outs).to(dtype)
    module.load_state_dict({"weight": weight, "bias": bias})
    near(module(input.view(1, rows, ins))[0], input, weight, bias)
    # Few rows, other dtypes, gradients and a processor with a product of its own are left.
    assert linear.product_in_fp32(input[:20], weight, bias) is None
    assert linear.product_in_fp32(input.float(), weight.float(), None) is None
    with torch.enable_grad():
        assert linear.product_in_fp32(input, weight, bias) is None
    monkeypatch.setattr(linear, "_without_product", lambda dtype: False)
    assert linear.product_in_fp32(input, weight, bias) is None


def test_numbers_that_are_none() -> None:
    weight = draw(torch.float32, 6, 40)
    weight[1, 39], weight[4, 3] = torch.nan, torch.inf
    input = draw(torch.float32, 2, 40, seed=1).abs()
    made, wanted = linear.product(input, weight, None), by_pytorch(input, weight)
    torch.testing.assert_close(made, wanted, equal_nan=True)


@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40), (2, 1, 40), (2, 2, 2, 40)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    layer = linear.Linear(40, 9)
    input = draw(torch.float32, *shape)
    near(layer(input), input, layer.weight, layer.bias)
    assert linear.product(input, layer.weight, layer.bias) is not None


class OfAnotherKind(torch.nn.Parameter):
    """As quantized weights are."""


LEFT: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]]] = {
    "many rows": lambda x, w, b: (x.repeat(5, 1), w, b),
    "no rows": lambda x, w, b: (x[:0], w, b),
    "rows apart": lambda x, w, b: (x.repeat(1, 2)[:, ::2], w, b),
    "weights apart": lambda x, w, b: (x, w.t().contiguous().t(), b),
    "weights shared": lambda x, w, b: (x, w[:1].expand(9, -1), b),
    "bias apart": lambda x, w, b: (x, w, b.repeat_interleave(2)[::2]),
    "bias of others": lambda x, w, b: (x, w, b[:1]),
    "another dtype": lambda x, w, b: (x.bfloat16(), w, b),
    "a float64": lambda x, w, b: (x.double(), w.double(), b.double()),
    "another kind": lambda x, w, b: (x, OfAnotherKind(w, requires_grad=False), b),
    "sparse": lambda x, w, b: (x, w.to_sparse(), None),
    "on no device": lambda x, w, b: (x.to("meta"), w.to("meta"), None),
}


@pytest.mark.parametrize("how", LEFT)
def test_what_is_left_to_pytorch(how: str) -> None:
    tensors = draw(torch.float32, 2, 40), draw(torch.float32, 9, 40), draw(torch.float32, 9)
    assert linear.product(*tensors) is not None
    assert linear.product(*LEFT[how](*tensors)) is None


def test_an_input_that_does_not_fit_is_an_error_as_ever() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear.Linear(40, 9)(draw(torch.float32, 1, 41))


def test_gradients_autocast_and_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, input = linear.Linear(40, 9), draw(torch.float32, 1, 40)
    asked = input, layer.weight, layer.bias
    with torch.enable_grad():
        assert linear.product(*asked) is None
        assert layer(input).grad_fn is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert linear.product(*asked) is None
        assert layer(input).dtype == torch.bfloat16
    assert linear.product(*asked) is not None
    monkeypatch.setenv(build.VARIABLE, "0")
    assert linear.product(*asked) is None


@pytest.mark.usefixtures("anew")
def test_a_kernel_that_errs_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = linear._asked
    monkeypatch.setattr(linear, "_asked", lambda *asked: real(*asked) * 1.02)
    with caplog.at_level(logging.INFO, logger="rag_windows"):
        assert not any(linear.kernel(torch.bfloat16) for _ in range(3))
    assert ["differs" in record.getMessage() for record in caplog.records] == [True]


# Whole models.

WINDOWS, QUERY = [[5, 6, 7], [8, 9, 10, 11]], [12]


def logits(lm: WindowedLM) -> Tensor:
    """Of a query of one token, whose layers have one row each."""
    return lm.logits(lm.encode_ids([4], WINDOWS), QUERY)


def engine(model: LlamaForCausalLM) -> WindowedLM:
    return WindowedLM.from_pretrained(model, tokenizer=None)


def without(monkeypatch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> Tensor:
    """What PyTorch answers."""
    with monkeypatch.context() as patched:
        patched.setenv(build.VARIABLE, "0")
        return logits(engine(model))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of all weights that the kernel is asked for, in turn."""
    sizes: list[tuple[int, ...]] = []
    real = linear._asked

    def recorded(run: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sizes.append(tuple(weight.shape))
        return real(run, input, weight, bias)

    monkeypatch.setattr(linear, "_asked", recorded)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_served_and_stays_as_it_is(
    dtype: torch.dtype, served: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model().to(dtype)
    lm = engine(model)
    context = lm.encode_ids([4], WINDOWS)
    served.clear()
    rows = lm.logits(context, QUERY)
    assert len(served) == 2 * 7 + 1
    served.clear()
    lm.generate_ids(context, [12] * 60, max_new_tokens=3)
    assert len(served) == 2 * (2 * 7 + 1) + 1  # of the first token, the vocabulary layer alone
    served.clear()
    model(torch.tensor([QUERY]))
    assert served == []
    assert {type(one) for one in model.modules()}.isdisjoint({linear.Linear})
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (0.1, 0.05)
    torch.testing.assert_close(rows, without(monkeypatch, model), atol=atol, rtol=rtol)


class Doubled(torch.nn.Linear):
    """Another kind of layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def replaced(model: Any) -> None:
    layer = model.model.layers[0].mlp
    own = Doubled(48, 64, bias=False)
    own.weight = layer.up_proj.weight
    layer.up_proj = own


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, given, made: 2 * made)


def in_place(model: Any) -> None:
    model.lm_head.weight[:100] *= 2


@pytest.mark.parametrize("edit", [replaced, hooked, in_place])
def test_edits_are_seen_at_once(
    edit: Callable[[Any], None],
    served: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = small_model()
    lm = engine(model)
    before = logits(lm)
    edit(model)
    served.clear()
    after = logits(lm)
    assert not torch.allclose(before.float(), after.float(), rtol=1e-3)
    torch.testing.assert_close(after, without(monkeypatch, model), atol=1e-5, rtol=1e-5)
    assert served


def test_adapters(served: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's layers call the layers that they stand for, and small ones of their own."""
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = small_model()
    lm = engine(model)
    before = logits(lm)
    config = peft.LoraConfig(r=3, target_modules=["up_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    served.clear()
    after = logits(lm)
    assert {(3, 48), (64, 3), (64, 48)} <= set(served)
    assert not torch.allclose(before, after, rtol=1e-3)
    torch.testing.assert_close(after, without(monkeypatch, model), atol=1e-5, rtol=1e-5)


def test_windows_stay_in_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache knows a model by is the model's, whatever answers for its layers."""
    model, cache = small_model(), PassageCache("1MB")
    engine(model).with_cache(cache).encode_ids([4], WINDOWS)
    assert cache.stats().misses == 3
    monkeypatch.setattr("rag_windows.attention.mirror.class_of_view", type)
    engine(model).with_cache(cache).encode_ids([4], WINDOWS)
    assert (cache.stats().hits, cache.stats().misses) == (3, 3)
