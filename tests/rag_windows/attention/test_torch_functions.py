"""PyTorch's attention functions, as its versions have them: each is asked the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as of_torch

from rag_windows.attention import torch_functions

ASKED: dict[str, Any] = {
    "cu_seq_q": torch.tensor([0, 2, 4]),
    "cu_seq_k": torch.tensor([0, 5, 9]),
    "max_q": 2,
    "max_k": 4,
    "scale": 0.5,
    "window_size": (-1, -1),
    "enable_gqa": True,
    "seqused_k": torch.tensor([3, 4]),
}
TENSORS = torch.ones(4, 2, 8), torch.ones(9, 1, 8), torch.ones(9, 1, 8)
MADE = torch.zeros(4, 2, 8), torch.zeros(2, 4)


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    torch_functions._varlen_attn.cache_clear()
    yield
    torch_functions._varlen_attn.cache_clear()


@pytest.mark.parametrize("causal", [False, True])
def test_before_seqused_k_the_kernel_itself_is_asked(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen_attn(
        *tensors: Any, return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1)
    ) -> Any:
        raise AssertionError("it would read what is between windows")

    called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def kernel(*given: Any, **options: Any) -> Any:
        called.append((given, options))
        return *MADE, None, None, None

    monkeypatch.setattr(of_torch, "varlen_attn", varlen_attn)
    aten = SimpleNamespace(_flash_attention_forward=kernel)
    monkeypatch.setattr(torch, "ops", SimpleNamespace(aten=aten))
    window = (-1, 0) if causal else (-1, -1)
    assert torch_functions.varlen(*TENSORS, **ASKED | {"window_size": window}) == MADE
    ((given, options),) = called
    # query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask
    assert given[:3] == TENSORS
    assert given[3:5] == (ASKED["cu_seq_q"], ASKED["cu_seq_k"])
    assert given[5:] == (2, 4, 0.0, causal, False)
    assert options == {
        "scale": 0.5,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "seqused_k": ASKED["seqused_k"],
    }


def test_with_it_the_public_function_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []

    def varlen_attn(*tensors: Any, seqused_k: Any = None, **options: Any) -> Any:
        called.append({**options, "seqused_k": seqused_k})
        return MADE

    monkeypatch.setattr(of_torch, "varlen_attn", varlen_attn)
    assert torch_functions.varlen(*TENSORS, **ASKED) == MADE
    (options,) = called
    assert options.pop("return_aux").lse
    assert options.keys() == ASKED.keys()
    assert all(options[name] is value for name, value in ASKED.items())


def test_this_torch_has_one_of_both() -> None:
    public = inspect.signature(of_torch.varlen_attn).parameters
    kernel = str(torch.ops.aten._flash_attention_forward.default._schema)
    assert "seqused_k" in public or "Tensor? seqused_k=None" in kernel
    # What is asked of the kernel where the public function does not hand it on.
    wanted = "query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q"
    assert wanted in kernel
    assert "float dropout_p, bool is_causal, bool return_debug_mask" in kernel
