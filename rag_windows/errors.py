"""One hierarchy of errors; every message says what to do next.

All are ``RuntimeError`` subclasses: frameworks above us (LlamaIndex's refine step, for one) swallow
``ValueError`` and ``TypeError`` and would answer with nothing instead of telling the user.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from difflib import get_close_matches


class RagWindowsError(RuntimeError):
    """Base of every error that rag-windows raises on purpose."""


class InputError(RagWindowsError):
    """An argument has the wrong type, shape or value."""


class LimitError(InputError):
    """A passage, a query or a request is too large; nothing was computed."""


class PromptError(InputError):
    """A prompt can't be built: template, roles, or text that can't be encoded safely."""


class MethodError(InputError):
    """An unknown method name, or parameters outside a method's domain."""


class ProfileError(InputError):
    """A profile can't be read, written or used."""


class DataError(InputError):
    """An evaluation's data, predictions or run folder can't be read; names the file and record."""


class ModelError(RagWindowsError):
    """A model can't be used."""


class ModelLoadError(ModelError):
    """A model or tokenizer can't be found or loaded."""


class UnsupportedModelError(ModelError):
    """This model type can't read windows, neither together nor in rows; the message says why.

    Attributes:
        reason: a part of a sentence about the model, where it is known.
        measured: whether it is about numbers that the model gave, not about its kind.
    """

    reason: str = ""
    measured: bool = False


class ToolsUnsupportedError(ModelError, NotImplementedError):
    """This model's chat template can't show tools, or its calls of them can't be read or forced."""


class GenerationError(RagWindowsError):
    """Generation was asked for something it can't do, or failed."""


class GenerationTimeoutError(GenerationError):
    """Generation took longer than its timeout."""


class CancelledGenerationError(GenerationError):
    """Generation was cancelled, because nobody waits for it any more."""


class DocumentError(RagWindowsError):
    """A document can't be read or holds no text."""


class RetrievalError(RagWindowsError):
    """A retriever can't be built or asked."""


class MissingExtraError(RagWindowsError):
    """An optional dependency is not installed; the message names the extra to install."""


class CacheError(RagWindowsError):
    """A passage cache can't be opened or used as asked."""


class NonFiniteError(CacheError):
    """A window's keys or values hold NaN or infinity, so no answer could be right."""


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f'pip install "rag-windows[{extra}]"'


def installed(package: str) -> bool:
    """Whether a package of this name on the package index is there to import."""
    module = package.removeprefix("python-").replace("-", "_")
    return importlib.util.find_spec(module) is not None


def require(what: str, *packages: str, extra: str) -> None:
    """Say in one line which packages are not installed, and the command that installs them.

    Args:
        what: needs them, the sentence's subject: "Loading a GGUF file".
        packages: their names on the package index; their modules have underscores for hyphens, and
            lack ``python-``.
        extra: of rag-windows that brings them.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    if absent := [name for name in packages if not installed(name)]:
        raise MissingExtraError(
            f"{what} needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not "
            f"installed; run: {install(extra)}"
        )


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """The question whether another name was meant; nothing where none is like it."""
    found = get_close_matches(given, sorted(names), n=1, cutoff=0.7)
    return f"Did you mean {found[0]!r}?" if found else ""


def without_stop_iteration(error: BaseException) -> BaseException:
    """The error itself, or for a StopIteration a GenerationError with it as the cause.

    Python takes a StopIteration for the end of an iterator: no future can carry it, so that whoever
    awaits one would wait for ever, and a generator turns it into a RuntimeError.
    """
    if not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    report = GenerationError(
        f"A function that was passed to this call raised {type(error).__name__}, which looks like "
        "the end of an iterator. Let it raise another error, or give next() a default."
    )
    report.__cause__ = error
    return report
