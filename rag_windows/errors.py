"""One hierarchy of errors; every message says what to do next.

All are ``RuntimeError`` subclasses: frameworks above us (LlamaIndex's refine step, for one) swallow
``ValueError`` and ``TypeError`` and would answer with nothing instead of telling the user.
"""


class RagWindowsError(RuntimeError):
    """Base of every error that rag-windows raises on purpose."""


class InputError(RagWindowsError):
    """An argument has the wrong type, shape or value."""


class LimitError(InputError):
    """A passage, a query or a request is larger than a hard limit; raised before any work."""


class PromptError(InputError):
    """A prompt can't be built: template, roles, or text that can't be encoded safely."""


class MethodError(InputError):
    """An unknown method name, or parameters outside a method's domain."""


class ProfileError(InputError):
    """A calibration profile can't be read, written or used."""


class DataError(InputError):
    """An evaluation's data, predictions or run folder can't be read; names file and record."""


class ModelError(RagWindowsError):
    """A model can't be used."""


class ModelLoadError(ModelError):
    """A model or tokenizer can't be found or loaded."""


class UnsupportedModelError(ModelError):
    """This model type's attention can't be split into windows; the message says why."""


class ToolsUnsupportedError(ModelError, NotImplementedError):
    """This model's chat template can't show tools, or its calls of them can't be read or forced."""


class GenerationError(RagWindowsError):
    """Generation was asked for something it can't do, or failed on the way."""


class GenerationTimeoutError(GenerationError):
    """Generation took longer than it was given."""


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
