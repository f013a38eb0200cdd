"""Our errors in LangChain's own kinds, so that its handlers and fallbacks know them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelTimeoutError,
)

from rag_windows.errors import (
    GenerationError,
    GenerationTimeoutError,
    InputError,
    LimitError,
    MethodError,
    ModelLoadError,
    PromptError,
    RagWindowsError,
)


class RequestError(InputError, ModelInvalidRequestError, ValueError):
    """An argument, a message or a document can't be used; nothing was generated."""


class PromptRequestError(PromptError, RequestError):
    """The messages can't be made into a prompt for this model."""


class MethodRequestError(MethodError, RequestError):
    """An unknown method, or numbers outside its domain."""


class OverflowRequestError(LimitError, ContextOverflowError, RequestError):
    """A document, or the whole request, is too long for the model."""


class OptionRequestError(GenerationError, ModelInvalidRequestError, ValueError):
    """An option of ``generate`` that can't work with windows."""


class ModelMissingError(ModelLoadError, ModelNotFoundError, ValueError):
    """The model can't be found or loaded."""


class RequestTimeoutError(GenerationTimeoutError, ModelTimeoutError):
    """The answer took longer than ``timeout`` seconds."""


_KINDS = (
    *(OverflowRequestError, PromptRequestError, MethodRequestError, RequestError),
    *(RequestTimeoutError, OptionRequestError, ModelMissingError),
)
"""Each derives from the engine's error of its kind first; the narrower ones stand before."""


@contextmanager
def in_langchain_terms() -> Iterator[None]:
    """Raise the engine's errors as the kinds above, which are engine errors too."""
    try:
        yield
    except RagWindowsError as error:
        kind = next((kind for kind in _KINDS if isinstance(error, kind.__bases__[0])), None)
        if kind is None or isinstance(error, kind):
            raise
        raise kind(str(error)) from error
