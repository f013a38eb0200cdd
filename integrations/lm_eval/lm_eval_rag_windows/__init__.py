"""rag-windows for lm-evaluation-harness: each few-shot example in an attention window of its own.

Importing this package registers the model `rag-windows` with the harness::

    import lm_eval, lm_eval_rag_windows

    lm_eval.simple_evaluate(model="rag-windows", model_args="pretrained=...,method=ape", ...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval_rag_windows.model import RagWindowsLM

__all__ = ["NAME", "RagWindowsLM", "register"]

NAME = "rag-windows"
"""What ``--model`` takes."""


def register() -> None:
    """Make the harness know the model; the class itself is imported when it is asked for."""
    # The harness fills an empty registry with its own models on first use; one that holds ours
    # already would stay without them.
    import lm_eval.models  # noqa: F401  # fills the registry
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target="lm_eval_rag_windows.model:RagWindowsLM")


register()


def __getattr__(name: str) -> Any:
    # The harness's model classes import torch; whoever only wants the name registered need not.
    if name == "RagWindowsLM":
        from lm_eval_rag_windows.model import RagWindowsLM

        return RagWindowsLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
