"""The optional packages that scoring needs."""

from __future__ import annotations

from importlib.util import find_spec

from rag_windows.errors import MissingExtraError, install


def check_packages(*names: str) -> None:
    """Make sure that packages are there, such as "spacy"; before a long run, not after it.

    Raises:
        MissingExtraError: one is not installed.
    """
    if absent := [name for name in names if find_spec(name) is None]:
        raise MissingExtraError(
            f"Scoring needs what is not installed: {', '.join(absent)}; run: {install('eval')}"
        )
