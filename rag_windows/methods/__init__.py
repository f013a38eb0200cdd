"""How windows are encoded and how the query reads them: one small class a method."""

from rag_windows.methods.ape import APE
from rag_windows.methods.base import (
    Alignment,
    Method,
    query_bias,
    window_starts,
)
from rag_windows.methods.codebook import Codebook
from rag_windows.methods.composed import Composed, chain
from rag_windows.methods.deep_thinking import DeepThinking
from rag_windows.methods.ensemble import ParallelEnsemble
from rag_windows.methods.linked import Linked, linked
from rag_windows.methods.mateicl import MateICL
from rag_windows.methods.pcw import PCW
from rag_windows.methods.registry import METHODS, describe, resolve
from rag_windows.methods.sequential import Sequential
from rag_windows.methods.structured_prompting import StructuredPrompting

__all__ = [
    "APE",
    "METHODS",
    "PCW",
    "Alignment",
    "Codebook",
    "Composed",
    "DeepThinking",
    "Linked",
    "MateICL",
    "Method",
    "ParallelEnsemble",
    "Sequential",
    "StructuredPrompting",
    "chain",
    "describe",
    "linked",
    "query_bias",
    "resolve",
    "window_starts",
]
