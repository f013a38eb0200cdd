"""Methods by name."""

from __future__ import annotations

from types import MappingProxyType

from rag_windows.errors import MethodError
from rag_windows.rescaling.ape import APE
from rag_windows.rescaling.base import Method
from rag_windows.rescaling.pcw import PCW
from rag_windows.rescaling.sequential import Sequential

METHODS: MappingProxyType[str, type[Method]] = MappingProxyType(
    {method.name: method for method in (APE, PCW, Sequential)}
)
"""Every method, by the name that `resolve` and the command line take."""


def resolve(method: str | Method) -> Method:
    """Turn a name into a method with its defaults; a method comes back as it is.

    Raises:
        MethodError: the name is unknown, or the value is neither a name nor a method.
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, str) and method.lower() in METHODS:
        return METHODS[method.lower()]()
    raise MethodError(f"Unknown method {method!r}; choose one of {sorted(METHODS)}.")
