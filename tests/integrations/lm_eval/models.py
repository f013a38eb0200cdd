"""Tiny models for any tokenizer, wrapped by us and by the harness itself."""

from __future__ import annotations

import functools
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import LlamaForCausalLM

from lm_eval_rag_windows.model import RagWindowsLM
from tests.fixtures_tokenizers import build
from tests.rag_windows import small

POSITIONS = 512


@functools.cache
def weights(name: str) -> LlamaForCausalLM:
    tokenizer = build(name)
    own = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {id_: getattr(tokenizer, id_) for id_ in own}
    return small.build(vocab_size=len(tokenizer) + 8, max_position_embeddings=POSITIONS, **ids)


def ours(name: str, **arguments: Any) -> RagWindowsLM:
    return RagWindowsLM(weights(name), tokenizer=build(name), **arguments)


@functools.cache
def theirs(name: str) -> HFLM:
    return HFLM(pretrained=weights(name), tokenizer=build(name))


def scored(lm: Any, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    """Log-likelihoods of (context, continuation) pairs."""
    return list(lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True))


def said(lm: Any, context: str, **options: Any) -> str:
    """A free answer."""
    asked = requests("generate_until", (context, options))
    return str(lm.generate_until(asked, disable_tqdm=True)[0])


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, 0, ("some_task", 0, 1)) for each in arguments]


def cut(lm: RagWindowsLM, context: str) -> list[str]:
    """Prefix, windows and question as text."""
    made = lm.cut(context)
    return [lm.tokenizer.decode(ids) for ids in (made.prefix, *made.windows, made.question)]
