"""rag-windows: local language models that read each retrieved passage in a window of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_windows.batching.scheduler import Scheduler
    from rag_windows.cache.passage_cache import PassageCache
    from rag_windows.calibration import Example, Profile
    from rag_windows.codebook.book import PassageBook
    from rag_windows.errors import (
        CacheError,
        CancelledGenerationError,
        DataError,
        DocumentError,
        GenerationError,
        GenerationTimeoutError,
        InputError,
        LimitError,
        MethodError,
        MissingExtraError,
        ModelError,
        ModelLoadError,
        NonFiniteError,
        ProfileError,
        PromptError,
        RagWindowsError,
        RetrievalError,
        ToolsUnsupportedError,
        UnsupportedModelError,
    )
    from rag_windows.guard import Guard
    from rag_windows.icl import Classification, Demonstration
    from rag_windows.icl.scoring import Score
    from rag_windows.methods import (
        APE,
        METHODS,
        PCED,
        PCW,
        Aligned,
        Auto,
        Codebook,
        DeepThinking,
        Linked,
        MateICL,
        Method,
        Neighbours,
        ParallelEnsemble,
        QueryLikelihood,
        Sequential,
        Sink,
        StructuredPrompting,
    )
    from rag_windows.model import WindowedLM
    from rag_windows.passage import Passage, with_neighbours
    from rag_windows.request import BatchRequest
    from rag_windows.results import Chunk, Citation, Fallback, Generation, Statement, Timings, Usage

__version__ = "0.1.0"

__all__ = [
    "APE",
    "Aligned",
    "Auto",
    "METHODS",
    "PCED",
    "PCW",
    "BatchRequest",
    "CacheError",
    "CancelledGenerationError",
    "Chunk",
    "Citation",
    "Classification",
    "Codebook",
    "DataError",
    "DeepThinking",
    "Demonstration",
    "DocumentError",
    "Example",
    "Fallback",
    "Generation",
    "GenerationError",
    "GenerationTimeoutError",
    "Guard",
    "InputError",
    "LimitError",
    "Linked",
    "MateICL",
    "Method",
    "MethodError",
    "MissingExtraError",
    "ModelError",
    "ModelLoadError",
    "Neighbours",
    "NonFiniteError",
    "ParallelEnsemble",
    "Passage",
    "PassageBook",
    "PassageCache",
    "Profile",
    "ProfileError",
    "PromptError",
    "QueryLikelihood",
    "RagWindowsError",
    "RetrievalError",
    "Scheduler",
    "Score",
    "Sequential",
    "Sink",
    "Statement",
    "StructuredPrompting",
    "Timings",
    "ToolsUnsupportedError",
    "UnsupportedModelError",
    "Usage",
    "WindowedLM",
    "__version__",
    "with_neighbours",
]

# Imported on first use: the command line shows its help and its errors without loading torch.
_MODULES = (
    "errors",
    "passage",
    "results",
    "methods",
    "guard",
    "request",
    "calibration",
    "icl",
    "icl.scoring",
    "cache.passage_cache",
    "codebook.book",
    "batching.scheduler",
    "model",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            home = import_module(f"rag_windows.{module}")
            if hasattr(home, name):
                globals()[name] = value = getattr(home, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
