"""Remedies that several packages name: what to install, and what to write for windows."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Collection

LONG_PROMPT_TOKENS = 512
"""A prompt of so many tokens and no passages probably holds documents that were glued together."""

_warned = threading.Event()


def install(extra: str) -> str:
    """The command that installs an extra, as it is typed in a checkout of the repository."""
    return f'pip install ".[{extra}]"'


def missing(what: str, package: str, extra: str) -> str:
    """One line for a package that is not installed: who needs it, and the remedy.

    Args:
        what: that does not work without it, the sentence's subject: "The LangChain adapter".
        package: its name on the package index.
        extra: of this distribution that brings it.
    """
    return f"{what} needs {package}, which is not installed; run: {install(extra)}"


def warn_without_windows(tokens: int, passages: int, instead: str, *, stacklevel: int = 2) -> None:
    """Warn, once a process, of a long prompt without passages: it makes no windows.

    Args:
        tokens: of the prompt.
        passages: that came with it.
        instead: the line to write, which hands over documents as passages.
        stacklevel: as in `warnings.warn`, counted from the caller.
    """
    if passages or tokens < LONG_PROMPT_TOKENS or _warned.is_set():
        return
    _warned.set()
    warnings.warn(
        f"This prompt has {tokens} tokens and no passages, so nothing is read in windows or cached."
        f" If it holds retrieved documents, hand them over instead: {instead}",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def user_level(between: Collection[str]) -> int:
    """The ``stacklevel`` of the user's own line, for a warning of the caller.

    Args:
        between: top-level packages whose frames stand between the user and the caller. In a thread
            of a pool no line of the user's is found, and the outermost frame has to do.
    """
    level, frame = 1, sys._getframe(1)
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in between
    ):
        level, frame = level + 1, frame.f_back
    return level
