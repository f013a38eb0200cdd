"""Methods by name."""

from __future__ import annotations

from types import MappingProxyType

from rag_windows.errors import MethodError
from rag_windows.rescaling.ape import APE
from rag_windows.rescaling.base import Method
from rag_windows.rescaling.codebook import Codebook
from rag_windows.rescaling.composed import Composed
from rag_windows.rescaling.deep_thinking import DeepThinking
from rag_windows.rescaling.ensemble import ParallelEnsemble
from rag_windows.rescaling.linked import Linked
from rag_windows.rescaling.mateicl import MateICL
from rag_windows.rescaling.pcw import PCW
from rag_windows.rescaling.sequential import Sequential
from rag_windows.rescaling.structured_prompting import StructuredPrompting

CLASSES: tuple[type[Method], ...] = (
    APE,
    PCW,
    StructuredPrompting,
    MateICL,
    ParallelEnsemble,
    DeepThinking,
    Codebook,
    Linked,
    Sequential,
)

METHODS: MappingProxyType[str, type[Method]] = MappingProxyType(
    {method.name: method for method in CLASSES}
)
"""Every method, by the name that `resolve` and the command line take."""


def resolve(method: str | Method) -> Method:
    """Turn a name into a method with its defaults; a method comes back as it is.

    "a+b" is the method a on top of the method b, as "deep-thinking+ape".

    Raises:
        MethodError: the name is unknown, the methods can't be combined, or the value is neither a
            name nor a method.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise MethodError(f"Unknown method {method!r}; choose one of {sorted(METHODS)}.")
    kinds = [_kind(name.strip().lower(), method) for name in method.split("+")]
    built = kinds.pop()()
    for kind in reversed(kinds):
        if not issubclass(kind, Composed):
            wrappers = sorted(name for name, one in METHODS.items() if issubclass(one, Composed))
            raise MethodError(
                f"{method!r}: {kind.name} reads windows by itself, so it stands last; before a "
                f"'+' stand only {wrappers}."
            )
        built = kind(reader=built)
    return built


def _kind(name: str, whole: str) -> type[Method]:
    if name in METHODS:
        return METHODS[name]
    raise MethodError(
        f"Unknown method {name!r}{'' if name == whole.lower() else f' in {whole!r}'}; choose one "
        f"of {sorted(METHODS)}."
    )
