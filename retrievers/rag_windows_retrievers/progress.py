"""How far a long step is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rag_windows.errors import MissingExtraError
from rag_windows.hints import missing

Progress: TypeAlias = Callable[[int, int], None]
"""Called with what is done and the total, in passages; from 0 to the total, never backwards."""


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar on standard error, shown only where that is a terminal.

    Args:
        label: stands before the bar.

    Raises:
        MissingExtraError: `tqdm` is not installed.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise MissingExtraError(missing("A progress bar", "tqdm", "retrievers")) from error
    with tqdm(desc=label, unit=" passages", disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
