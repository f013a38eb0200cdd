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
        PCW,
        Codebook,
        DeepThinking,
        Linked,
        MateICL,
        Method,
        ParallelEnsemble,
        Sequential,
        StructuredPrompting,
    )
    from rag_windows.model import WindowedLM
    from rag_windows.passage import Passage
    from rag_windows.request import BatchRequest
    from rag_windows.results import Chunk, Citation, Fallback, Generation, Timings, Usage

__version__ = "0.1.0"

__all__ = [
    "APE",
    "METHODS",
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
    "NonFiniteError",
    "ParallelEnsemble",
    "Passage",
    "PassageBook",
    "PassageCache",
    "Profile",
    "ProfileError",
    "PromptError",
    "RagWindowsError",
    "RetrievalError",
    "Scheduler",
    "Score",
    "Sequential",
    "StructuredPrompting",
    "Timings",
    "ToolsUnsupportedError",
    "UnsupportedModelError",
    "Usage",
    "WindowedLM",
    "__version__",
]

# Imported on first use: the command line shows its help and its errors without loading torch.
_HOMES = {
    "rag_windows.batching.scheduler": ("Scheduler",),
    "rag_windows.cache.passage_cache": ("PassageCache",),
    "rag_windows.calibration": ("Example", "Profile"),
    "rag_windows.codebook.book": ("PassageBook",),
    "rag_windows.errors": (
        "CacheError",
        "CancelledGenerationError",
        "DataError",
        "DocumentError",
        "GenerationError",
        "GenerationTimeoutError",
        "InputError",
        "LimitError",
        "MethodError",
        "MissingExtraError",
        "ModelError",
        "ModelLoadError",
        "NonFiniteError",
        "ProfileError",
        "PromptError",
        "RagWindowsError",
        "RetrievalError",
        "ToolsUnsupportedError",
        "UnsupportedModelError",
    ),
    "rag_windows.results": ("Chunk", "Citation", "Fallback", "Generation", "Timings", "Usage"),
    "rag_windows.guard": ("Guard",),
    "rag_windows.icl": ("Classification", "Demonstration"),
    "rag_windows.model": ("WindowedLM",),
    "rag_windows.passage": ("Passage",),
    "rag_windows.request": ("BatchRequest",),
    "rag_windows.methods": (
        "APE",
        "METHODS",
        "PCW",
        "Codebook",
        "DeepThinking",
        "Linked",
        "MateICL",
        "Method",
        "ParallelEnsemble",
        "Sequential",
        "StructuredPrompting",
    ),
    "rag_windows.icl.scoring": ("Score",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
