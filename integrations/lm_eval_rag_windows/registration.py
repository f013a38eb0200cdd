"""The model's name in the harness's registry."""

from __future__ import annotations

from importlib.util import find_spec

from rag_windows.errors import MissingExtraError, missing

NAME = "rag-windows"
"""What ``--model`` takes."""

TARGET = "lm_eval_rag_windows.model:RagWindowsLM"


def register() -> None:
    """Make the harness know the model; the class itself is imported when it is asked for.

    Raises:
        MissingExtraError: the harness is not installed.
    """
    if find_spec("lm_eval") is None:
        raise MissingExtraError(missing("lm_eval_rag_windows", "lm-eval", "lm-eval"))
    # The harness fills an empty registry with its own models on first use; one that holds ours
    # already would stay without them.
    import lm_eval.models  # noqa: F401  # fills the registry
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)
