"""What another inference engine needs to share entries and prompts with this one.

It imports neither transformers nor anything that runs a model, so that an engine with another
version of transformers can use it. The package `vllm_rag_windows` imports this module and
`rag_windows.errors`, and nothing else of `rag_windows`.

An entry is filed under a key of a `KeyScope`, which holds the fingerprints of model and tokenizer
and the ids of the prefix; `PassageCache` keeps an `Entry` in memory and on disk; a `Prompt` makes
token ids of a conversation and its passages.
"""

from __future__ import annotations

from rag_windows.cache import codec
from rag_windows.cache.codec import Entry, is_finite
from rag_windows.cache.keys import NO_TOKENIZER, KeyScope, fields, label_digest, salt_key
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.kv import Window
from rag_windows.methods import Method, resolve
from rag_windows.methods.base import query_bias
from rag_windows.passage import Passage, passage_of, refuse_single
from rag_windows.prompt.builder import Prompt, PromptParts

EXACT = codec.EXACT
"""The form in which entries are stored as computed; part of what they are filed under."""

__all__ = [
    "EXACT",
    "NO_TOKENIZER",
    "Entry",
    "KeyScope",
    "Method",
    "Passage",
    "PassageCache",
    "Prompt",
    "PromptParts",
    "Window",
    "fields",
    "is_finite",
    "label_digest",
    "passage_of",
    "query_bias",
    "refuse_single",
    "resolve",
    "salt_key",
]
