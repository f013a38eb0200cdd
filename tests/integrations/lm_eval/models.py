"""Tiny models for any tokenizer, wrapped by us and by the harness itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM

from lm_eval_rag_windows.model import RagWindowsLM
from tests.fixtures_tokenizers import build

POSITIONS = 512


@functools.cache
def weights(name: str) -> LlamaForCausalLM:
    """Two layers, fp32, large enough that attention is uneven."""
    tokenizer = build(name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.25,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval()


def ours(name: str, **arguments: Any) -> RagWindowsLM:
    return RagWindowsLM(weights(name), tokenizer=build(name), **arguments)


@functools.cache
def theirs(name: str) -> HFLM:
    return HFLM(pretrained=weights(name), tokenizer=build(name))


def scored(lm: Any, *pairs: tuple[str, str], doc: Any = None) -> list[tuple[float, bool]]:
    """Log-likelihoods of (context, continuation) pairs."""
    requests = [
        Instance("loglikelihood", doc or {}, pair, index, ("some_task", 0, 1))
        for index, pair in enumerate(pairs)
    ]
    return list(lm.loglikelihood(requests, disable_tqdm=True))


def said(lm: Any, *contexts: str, **options: Any) -> list[str]:
    """Free answers."""
    requests = [
        Instance("generate_until", {}, (context, dict(options)), 0, ("some_task", index, 1))
        for index, context in enumerate(contexts)
    ]
    return list(lm.generate_until(requests, disable_tqdm=True))


def cut(lm: RagWindowsLM, context: str, doc: Any = None) -> list[str]:
    """Prefix, windows and question as text."""
    made = lm.cut(context, doc)
    return [lm.tokenizer.decode(ids) for ids in (made.prefix, *made.windows, made.question)]
