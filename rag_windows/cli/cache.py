"""What `rag-windows cache ...` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rag_windows.cli import render
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.engine import ModelOptions, closing_cache, load_model, quieten
from rag_windows.cli.errors import tell
from rag_windows.cli.progress import Progress
from rag_windows.prompt.visible_text import encodable, visible

if TYPE_CHECKING:
    from rag_windows.cache.passage_cache import PassageCache


def show_stats(folder: str | None, *, as_json: bool) -> None:
    """Show what a folder holds.

    Raises:
        CacheError: it can't be used.
    """
    with _open(folder) as cache:
        held = _held(cache)
    _tell(
        held,
        f"{held['folder']}: {held['entries']} windows, {_size(held['bytes'])} "
        f"of at most {_size(held['limit_bytes'])}.",
        as_json=as_json,
    )


def warm(
    search: SearchOptions,
    system: str | None,
    model: ModelOptions,
    *,
    as_json: bool,
) -> None:
    """Encode documents ahead.

    Raises:
        RagWindowsError: see `open_corpus`, `load_model` and `WindowedLM.warm`.
    """
    progress = Progress()
    corpus = open_corpus(search, progress)
    lm = load_model(model, progress)
    for note in corpus.notes:
        tell(f"Note: {note}")
    with closing_cache(lm), progress.counting("Encoding the passages") as counted:
        warmed = lm.warm(
            corpus.retriever.passages,
            prefix=None if system is None else encodable(system),
            on_warmed=lambda done, total: counted(done, total or done),
        )
    result = {
        "passages": warmed.passages,
        "encoded": warmed.encoded,
        "present": warmed.present,
        "tokens": warmed.tokens,
        "seconds": warmed.seconds,
    }
    _tell(
        result,
        f"{warmed.passages} passages: {warmed.encoded} windows encoded ({warmed.tokens} tokens), "
        f"{warmed.present} were there, in {warmed.seconds:.1f} s.",
        as_json=as_json,
    )


def verify(folder: str | None, *, as_json: bool) -> None:
    """Read everything; what can't be proved right is put aside.

    Raises:
        CacheError: the folder can't be used.
    """
    with _open(folder) as cache, Progress().waiting("Reading every window"):
        checked, quarantined = cache.verify()
    _tell(
        {"checked": checked, "quarantined": quarantined},
        f"{checked} windows read, {quarantined} of them put aside.",
        as_json=as_json,
    )


def clear(folder: str | None, *, as_json: bool) -> None:
    """Forget everything.

    Raises:
        CacheError: the folder can't be used.
    """
    with _open(folder) as cache:
        before = _held(cache)["entries"]
        cache.clear()
    _tell({"removed": before}, f"{before} windows forgotten.", as_json=as_json)


def invalidate(
    ids: Sequence[str], folder: str | None, *, every_tenant: bool, as_json: bool
) -> None:
    """Forget the windows of some passages or documents.

    Raises:
        CacheError: the folder can't be used.
        InputError: what is named can't be looked for in every tenant's windows.
    """
    with _open(folder) as cache:
        removed = cache.invalidate(ids, every_tenant=every_tenant)
    _tell({"removed": removed}, f"{removed} windows forgotten.", as_json=as_json)


def prune(folder: str | None, disk: str | None, *, as_json: bool) -> None:
    """Drop what is outdated, and what does not fit.

    Raises:
        CacheError: the folder can't be used.
        InputError: no size.
    """
    with _open(folder) as cache:
        before = _held(cache)["entries"]
    with _open(folder, disk) as cache:
        cache.prune()
        held = _held(cache)
    removed = before - held["entries"]
    _tell(
        {"removed": removed, **held},
        f"{removed} windows dropped; {held['entries']} of {_size(held['bytes'])} are left.",
        as_json=as_json,
    )


def _open(folder: str | None, disk: str | None = None) -> PassageCache:
    quieten(verbose=False)
    from rag_windows.cache.passage_cache import PassageCache

    sizes: dict[str, Any] = {} if disk is None else {"disk": disk}
    return PassageCache.default(folder, memory=None, **sizes)


def _held(cache: PassageCache) -> dict[str, Any]:
    disk = cache.stats().tiers["disk"]
    return {
        "folder": str(cache.path),
        "entries": disk.entries,
        "bytes": disk.bytes,
        "limit_bytes": disk.limit_bytes,
    }


def _size(size: int) -> str:
    from rag_windows.cache.sizes import show_size

    return show_size(size)


def _tell(result: dict[str, Any], line: str, *, as_json: bool) -> None:
    if as_json:
        render.write_json(result)
    else:
        render.console().print(visible(line), soft_wrap=True)
