"""The commands `cache ...`: the passage cache on disk."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize

from rag_windows.cli import options
from rag_windows.cli.options import ModelOptions, SearchOptions, loaded_model, open_corpus, quieten
from rag_windows.cli.render import Group, progress, show, write_json

if TYPE_CHECKING:
    from rag_windows import PassageCache

cache = typer.Typer(
    help="Inspect and manage the passage cache, which keeps encoded passages on disk.",
    cls=Group,
)


@cache.command()
def stats(cache_dir: options.CacheDir = None, json: options.Json = False) -> None:
    """Show the cache's folder, the number of its windows and their size."""
    with _open(cache_dir) as opened:
        held = _held(opened)
    size, limit = (_size(held[name]) for name in ("bytes", "limit_bytes"))
    line = f"{held['folder']}: {held['entries']} windows, {size} of at most {limit}."
    _print(json, line, held)


@cache.command()
@options.spreading(
    without=("top_k", "method", "profile", "rag_temperature", "rag_scale", "no_cache")
)
def warm(
    *,
    search: SearchOptions,
    model: ModelOptions,
    system: options.System = None,
    json: options.Json = False,
) -> None:
    """Encode documents before the first question; continues where it was interrupted.

    Give the same model, instruction (--system) and passage lengths as for the questions later.
    """
    passages = open_corpus(search, model.model).passages
    with loaded_model(model) as lm, progress("Encoding the passages") as counted:
        counted(0, len(passages))
        warmed = lm.warm(
            passages, prefix=system, on_warmed=lambda done, total: counted(done, total or done)
        )
    line = (
        f"{warmed.passages} passages: {warmed.encoded} windows encoded ({warmed.tokens} tokens), "
        f"{warmed.present} were in the cache already; {warmed.seconds:.1f} s."
    )
    _print(json, line, dataclasses.asdict(warmed))


@cache.command()
def verify(cache_dir: options.CacheDir = None, json: options.Json = False) -> None:
    """Check every window and delete those that are damaged."""
    with _open(cache_dir) as opened, progress("Checking every window"):
        checked, quarantined = opened.verify()
    line = f"{checked} windows checked, {quarantined} of them damaged and deleted."
    _print(json, line, {"checked": checked, "quarantined": quarantined})


@cache.command()
def clear(cache_dir: options.CacheDir = None, json: options.Json = False) -> None:
    """Remove all windows of all models."""
    with _open(cache_dir) as opened:
        removed = _held(opened)["entries"]
        opened.clear()
    _print(json, f"{removed} windows removed.", {"removed": removed})


@cache.command()
def invalidate(
    ids: Annotated[list[str], typer.Argument(help="Ids of passages or of documents.")],
    every_tenant: Annotated[
        bool,
        options.flag(
            "--every-tenant",
            "Remove for every tenant; IDS are then digests of ids, or names of cache files.",
        ),
    ] = False,
    cache_dir: options.CacheDir = None,
    json: options.Json = False,
) -> None:
    """Remove the windows of some passages or documents."""
    with _open(cache_dir) as opened:
        removed = opened.invalidate(ids, every_tenant=every_tenant)
    _print(json, f"{removed} windows forgotten.", {"removed": removed})


@cache.command()
def prune(
    cache_dir: options.CacheDir = None,
    disk: Annotated[
        str | None,
        options.option(
            "SIZE", 'Remove the least useful windows until the rest fits in SIZE, such as "10GiB".'
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Remove windows that are outdated and, with --disk, those that do not fit."""
    with _open(cache_dir, **({} if disk is None else {"disk": disk})) as opened:
        opened.prune()
        held, done = _held(opened), opened.stats().tiers["disk"]
    removed = done.evictions + done.expired + done.quarantined
    line = (
        f"{removed} windows removed; {held['entries']} windows of {_size(held['bytes'])} are left."
    )
    _print(json, line, {"removed": removed, **held})


def _open(folder: str | None, **sizes: Any) -> PassageCache:
    quieten(verbose=False)
    from rag_windows import PassageCache

    return PassageCache.default(folder, memory=None, **sizes)


def _held(opened: PassageCache) -> dict[str, Any]:
    disk = opened.stats().tiers["disk"]
    figures = {name: getattr(disk, name) for name in ("entries", "bytes", "limit_bytes")}
    return {"folder": str(opened.path), **figures}


def _size(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")


def _print(as_json: bool, line: str, result: dict[str, Any]) -> None:
    if as_json:
        write_json(result)
    else:
        show(line)
