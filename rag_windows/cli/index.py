"""The commands `index ...`: a collection of documents on disk, to which some come and go."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize
from rich.table import Column

from rag_windows.cli import options
from rag_windows.cli.corpus import (
    index_folder,
    make_private,
    quieten_readers,
    tell_left_out,
    with_embedder,
)
from rag_windows.cli.model_loading import quieten
from rag_windows.cli.render import (
    Group,
    console,
    plain_table,
    progress,
    show,
    tell,
    write_json,
)
from rag_windows.errors import InputError, RetrievalError
from rag_windows.folders import automatic_indexes
from rag_windows.visible_text import encodable, one_line

if TYPE_CHECKING:
    from rag_windows import Passage, PassageCache
    from rag_windows_retrievers import Changes, Index

DEFAULT = "default"
"""The index of those who name none, in the cache's folder of indexes."""

EXIT_LEFT = 1
"""Of `index remove`, where something of the documents is left."""

_LISTED = 20
"""Names that are shown of each kind; JSON has all."""

indexes = typer.Typer(
    help="Keep documents in an index on disk: add, replace, remove and search them. Questions take "
    "it with --index.",
    cls=Group,
)

Folder = Annotated[
    str | None,
    options.option("DIR", "Folder of the index. Default: index/default in the cache folder."),
]


@indexes.command()
def add(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Files, folders, quoted patterns or URLs such as s3://bucket/docs.",
        ),
    ],
    index: Folder = None,
    embedder: options.Embedder = None,
    passage_words: options.PassageWords = None,
    strict: options.Strict = False,
    cache_dir: options.CacheDir = None,
    shared: options.Shared = None,
    json: options.Json = False,
) -> None:
    """Make an index hold what files hold now: only those that are new or have changed are read.

    Of documents that were replaced, or whose files are gone, the windows go from the passage cache.
    """
    from rag_windows_retrievers import Index
    from rag_windows_retrievers.documents import no_text

    quieten_readers()
    folder = _folder(index, cache_dir)
    if index is None:
        make_private(folder)
    with progress("Reading documents") as counted:
        opened = Index(folder, words=passage_words)
        changes = opened.follow(
            paths,
            again=True,
            strict=strict,
            progress=lambda done, whole: counted(done, whole, "files"),
        )
    if not len(opened):
        raise no_text(paths, changes.skipped)
    tell_left_out(changes.skipped, strict=False)
    opened = with_embedder(opened, embedder)
    windows = 0
    if changes.stale:
        with _cache(cache_dir, shared) as cache:
            windows = cache.invalidate(changes.stale)
    held = {"documents": len(opened.documents()), "passages": len(opened)}
    if json:
        write_json({"folder": str(folder), **asdict(changes), **held, "windows": windows})
        return
    _show_changes(changes)
    shown = " with ".join(_number(count, name) for name, count in held.items())
    show(f"{folder} holds {shown}.")
    if windows:
        show(f"{_number(windows, 'windows')} of what was replaced or removed left the cache.")


def _show_changes(changes: Changes) -> None:
    for what in ("added", "replaced", "removed"):
        names = getattr(changes, what)
        show(f"{_number(len(names), 'documents')} {what}{':' if names else '.'}")
        for one in names[:_LISTED]:
            show(f"  {one_line(one)}")
        if more := len(names[_LISTED:]):
            show(f"  and {more} more")
    show(f"{_number(changes.unchanged, 'documents')} unchanged.")


@indexes.command()
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="Ids of documents, or files and folders; status --documents lists them.",
        ),
    ],
    index: Folder = None,
    cache_dir: options.CacheDir = None,
    shared: options.Shared = None,
    json: options.Json = False,
) -> None:
    """Remove documents with their windows in the passage cache, and prove that none is left.

    Files stay as they are, and are left out until they are added again. The exit code is 1 if
    something is left.
    """
    from rag_windows_retrievers import open_index

    opened = open_index(_folder(index, cache_dir))
    known = [name for one in names for name in _resolved(opened, one)]
    with _cache(cache_dir, shared) as cache, progress("Removing documents"):
        passages = opened.concerned(known)
        removed = opened.remove(known).removed
        labels = _labels([*names, *known, *removed], passages)
        windows = cache.invalidate(labels)
    with _cache(cache_dir, shared) as cache, progress("Checking what is left"):
        texts = {one.text for one in passages if one.text.strip()}
        left = list(_left(opened, known, texts, labels, cache))
        where = None if cache.path is None else cache.path
        store = None if cache.shared is None else cache.shared.url
        elsewhere = _elsewhere(opened.folder, index_folder(cache_dir), texts)
    for one in elsewhere:
        tell(
            f"Note: The index {one} holds some of the text, too. Name it with --index to remove "
            "it there."
        )
    if json:
        what = {"folder": str(opened.folder), "documents": removed, "passages": len(passages)}
        write_json({**what, "windows": windows, "left": left, "elsewhere": elsewhere})
    else:
        counts = {"documents": len(removed), "passages": len(passages), "windows": windows}
        shown = ", ".join(_number(count, name) for name, count in counts.items())
        show(f"Removed: {shown}.")
        if not left:
            places = " and ".join(str(one) for one in (where, store) if one is not None)
            show(
                f"None is left: {opened.folder} has no such document, no passage with their text "
                f"and an empty log, and {places} has no such window."
            )
    for reason in left:
        tell(f"Left: {reason}")
    if left:
        raise typer.Exit(EXIT_LEFT)


def _resolved(index: Index, name: str) -> list[str]:
    """The ids and labels that a name stands for: its own, or those of the files below a path."""
    if not name.strip():
        raise InputError("The name is empty. Name a document, a file or a folder.")
    listed = index.documents()
    known = {*index.sources(), *(one.id for one in listed), *(one.source for one in listed)}
    # What was removed before may be removed again, as where something was left.
    found = index.sources(below=name)
    if name in known and os.path.lexists(name) and found != [name]:
        here = ", ".join(found[:3]) or "not in the index"
        raise InputError(
            f"{name!r} names a document of the index, and also a file here, which is {here}. Name "
            "the one that is meant, or run the command in another folder."
        )
    if name in known or name in (index.stale_since(0)[1] or ()):
        return [name]
    if found:
        return found
    raise InputError(
        f"The index {index.folder} holds no document, file or folder {name!r}. Take a name from "
        "rag-windows index status --documents."
    )


def _labels(names: Sequence[str], passages: Sequence[Passage]) -> list[str]:
    """What the passage cache may know the windows by: names, ids and texts."""
    from rag_windows.integration import labels_of

    # Metadata name the file, whose other documents stay.
    found = [label for one in passages for label in labels_of(replace(one, metadata={}))]
    return list(dict.fromkeys([*names, *found]))


def _left(
    index: Index,
    names: Collection[str],
    texts: Collection[str],
    labels: Collection[str],
    cache: PassageCache,
) -> Iterator[str]:
    """What is left of documents that were removed, and what to do."""
    if there := index.concerned(names):
        again = dict.fromkeys(one.document or one.id for one in there)
        yield f"Another process has added {_some(again)} again. Repeat the command."
    elif copies := index.documents_with(texts):
        yield f"Some of the text is also in {_some(copies)}. Remove that, too."
    if not index.empty_log():
        yield (
            "Another process reads the index, so the log of changes still holds the text. Repeat "
            "the command when that is done."
        )
    if windows := cache.windows_of(labels):
        yield f"{_number(windows, 'windows')} came into the cache meanwhile. Repeat the command."


def _elsewhere(folder: Path, indexes: Path, texts: Collection[str]) -> list[str]:
    """Other indexes in the cache folder that hold some of these texts."""
    from rag_windows_retrievers import open_index

    found = []
    for one in (indexes / DEFAULT, *automatic_indexes(indexes.parent)) if texts else ():
        with suppress(RetrievalError):  # none, or one that nobody can read
            if one.resolve() != folder.resolve() and open_index(one).documents_with(texts):
                found.append(str(one))
    return found


@indexes.command()
def status(
    index: Folder = None,
    documents: Annotated[bool, options.flag("--documents", "List the documents, too.")] = False,
    cache_dir: options.CacheDir = None,
    json: options.Json = False,
) -> None:
    """Show what an index holds, which paths it follows, and which files could not be read."""
    from rag_windows_retrievers import open_index

    opened = open_index(_folder(index, cache_dir))
    with opened.snapshot():
        listed, passages, skipped = opened.documents(), len(opened), opened.skipped()
        paths, model = opened.roots(), opened.model_name
    size = opened.nbytes
    if json:
        shown: dict[str, Any] = {"folder": str(opened.folder), "documents": len(listed)}
        shown |= {"passages": passages, "bytes": size, "embedder": model, "paths": paths}
        shown["skipped"] = [asdict(one) for one in skipped]
        if documents:
            shown["contents"] = [asdict(one) for one in listed]
        write_json(shown)
        return
    stored = ByteSize(size).human_readable(separator=" ")
    show(
        f"{opened.folder}: {_number(len(listed), 'documents')} with "
        f"{_number(passages, 'passages')}, {stored}."
    )
    show(f"Embedding model: {model or 'none, passages are found by words'}.")
    for path in paths:
        show(f"Follows {one_line(path)}")
    for one in skipped:
        show(f"{'Not read' if one.problem else 'Left out'}: {one_line(one.label)}: {one.reason}")
    if documents:
        time, count = Column("added", no_wrap=True), Column("passages", justify="right")
        table = plain_table("id", "source", time, count)
        for each in listed:
            added = datetime.fromtimestamp(each.added).isoformat(" ", "seconds")
            source = one_line(each.source or "-")
            table.add_row(one_line(each.id), source, added, str(each.passages))
        console().print(table)


@indexes.command()
def search(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="What to look for.", parser=encodable)
    ],
    top_k: options.TopK = 8,
    index: Folder = None,
    embedder: options.Embedder = None,
    cache_dir: options.CacheDir = None,
    json: options.Json = False,
) -> None:
    """Show the passages that an index finds for a query, without a model that answers."""
    from rag_windows_retrievers import open_index

    if not query.strip():
        raise InputError("The query is empty. Write one, in quotes.")
    opened = with_embedder(open_index(_folder(index, cache_dir)), embedder)
    found = opened.retrieve(query, top_k)
    if json:
        fields = ("id", "title", "text", "score", "document", "place")
        write_json({"passages": [{name: getattr(one, name) for name in fields} for one in found]})
        return
    if not found:
        show("No passage shares a word with the query.")
        return
    score = Column("score", justify="right", no_wrap=True)
    text = Column("text", ratio=1, no_wrap=True, overflow="ellipsis", style="dim")
    table = plain_table(score, Column("id", style="bold", overflow="fold"), "place", text)
    table.expand = True
    for one in found:
        cells = (one.id or "-", one.place or "", one.text[:400])
        table.add_row(f"{one.score:.3f}", *map(one_line, cells))
    console().print(table)


def _folder(index: str | None, cache_dir: str | None) -> Path:
    return index_folder(cache_dir) / DEFAULT if index is None else Path(index)


def _cache(cache_dir: str | None, shared: str | None) -> PassageCache:
    quieten(verbose=False)
    from rag_windows import PassageCache

    return PassageCache.default(cache_dir, memory=None, shared=shared)


def _number(count: int, name: str) -> str:
    return f"{count:,} {name.removesuffix('s') if count == 1 else name}"


def _some(names: Collection[str | None]) -> str:
    first = [one_line(str(one)) for one in list(names)[:3]]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
