"""How windows are encoded and how the query reads them: one small class a method."""

from rag_windows.rescaling.alignment import Alignment, window_starts
from rag_windows.rescaling.ape import APE
from rag_windows.rescaling.base import Method
from rag_windows.rescaling.codebook import Codebook
from rag_windows.rescaling.composed import Composed, chain
from rag_windows.rescaling.deep_thinking import DeepThinking
from rag_windows.rescaling.description import describe, from_description
from rag_windows.rescaling.ensemble import ParallelEnsemble
from rag_windows.rescaling.linked import Linked, linked
from rag_windows.rescaling.mateicl import MateICL
from rag_windows.rescaling.pcw import PCW
from rag_windows.rescaling.registry import METHODS, resolve
from rag_windows.rescaling.sequential import Sequential
from rag_windows.rescaling.steps import Combination, Linking, Refinement, Selection
from rag_windows.rescaling.structured_prompting import StructuredPrompting
from rag_windows.rescaling.weighing import query_bias

__all__ = [
    "APE",
    "METHODS",
    "PCW",
    "Alignment",
    "Codebook",
    "Combination",
    "Composed",
    "DeepThinking",
    "Linked",
    "Linking",
    "MateICL",
    "Method",
    "ParallelEnsemble",
    "Refinement",
    "Selection",
    "Sequential",
    "StructuredPrompting",
    "chain",
    "describe",
    "from_description",
    "linked",
    "query_bias",
    "resolve",
    "window_starts",
]
