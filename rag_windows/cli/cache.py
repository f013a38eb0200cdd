"""The commands `cache ...`: the passage cache on disk, and the store that machines share."""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize

from rag_windows.cli import options
from rag_windows.cli.corpus import (
    SearchOptions,
    check_documents,
    read_passages,
    tell_left_out,
)
from rag_windows.cli.model_loading import LoadOptions, instruction, loaded_model, quieten
from rag_windows.cli.render import Group, progress, show, tell, write_json
from rag_windows.cli.replicas import RayOptions, fleet_options
from rag_windows.errors import InputError
from rag_windows.folders import automatic_indexes

if TYPE_CHECKING:
    from rag_windows import PassageCache
    from rag_windows_server.fleet.data import WarmedCorpus

_DAY_S = 86_400

cache = typer.Typer(
    help="Inspect and manage the passage cache, which keeps encoded passages on disk, or with "
    "--shared a store that machines share.",
    cls=Group,
)


Store = Annotated[
    str | None,
    options.option("URL", "Act on this shared store (or on one tenant's folder in it) instead."),
]


@cache.command()
def stats(
    cache_dir: options.CacheDir = None, shared: Store = None, json: options.Json = False
) -> None:
    """Show the cache's folder, the number of its windows and their size."""
    with _open(cache_dir, shared) as opened:
        held = _held(opened)
    where, size = held.get("folder", held.get("shared")), _size(held["bytes"])
    most = f" of at most {_size(held['limit_bytes'])}" if "limit_bytes" in held else ""
    _print(json, f"{where}: {held['entries']} windows, {size}{most}.", held)


@options.spreading(
    without=("top_k", "embedder", "method", "profile", "rag_temperature", "rag_scale", "no_cache")
)
def warm(
    *,
    search: SearchOptions,
    model: LoadOptions,
    system: options.Instruction = None,
    over: RayOptions,
    json: options.Json = False,
) -> None:
    """Encode documents before the first question; continues where it was interrupted.

    Give the same model, instruction (--system) and passage lengths as for the questions later. With
    --ray or --replicas, the processes of a cluster encode them into the --shared store.
    """
    model.check()
    if over.wanted:
        done = _warm_over_ray(search, model, system, over)
        warmed, unwritten = done.warmed, done.unwritten
    else:
        passages = read_passages(search, model)
        with loaded_model(model) as lm, progress("Encoding the passages") as counted:
            counted(0, len(passages))
            prefix = instruction(system, model.name, lm)
            warmed = lm.warm(
                passages, prefix=prefix, on_warmed=lambda done, total: counted(done, total or done)
            )
            store = None if lm.cache is None else lm.cache.shared
        unwritten = 0 if store is None else store.unwritten
    if unwritten:
        tell(
            f"Note: {unwritten} windows could not be written to the shared store. Repeat the "
            "command to write them."
        )
    line = (
        f"{warmed.passages} passages: {warmed.encoded} windows encoded ({warmed.tokens} tokens), "
        f"{warmed.present} were in the cache already; {warmed.seconds:.1f} s."
    )
    _print(json, line, dataclasses.asdict(warmed))


cache.command(help="Encode documents before the first question: the same as rag-windows warm.")(
    warm
)


def _warm_over_ray(
    search: SearchOptions, model: LoadOptions, system: str | None, over: RayOptions
) -> WarmedCorpus:
    check_documents(search, model.model)
    made = fleet_options(search, model, **over.size)
    from rag_windows_server.fleet import data

    with progress("Encoding the passages") as counted:
        done = data.warm(
            made,
            address=over.ray,
            prefix=partial(instruction, system, model.name),
            strict=search.strict,
            on_warmed=counted,
        )
    tell_left_out(done.skipped, strict=search.strict)
    return done


@cache.command()
def verify(
    cache_dir: options.CacheDir = None, shared: Store = None, json: options.Json = False
) -> None:
    """Check every window and delete those that are damaged."""
    with _open(cache_dir, shared) as opened, progress("Checking every window"):
        checked, quarantined = opened.verify()
    line = f"{checked} windows checked, {quarantined} of them damaged and deleted."
    _print(json, line, {"checked": checked, "quarantined": quarantined})


@cache.command()
def clear(
    cache_dir: options.CacheDir = None, shared: Store = None, json: options.Json = False
) -> None:
    """Remove all windows of all models, and the indexes of --docs in the cache folder."""
    with _open(cache_dir, shared) as opened:
        removed = _held(opened)["entries"]
        opened.clear()
        indexes = [] if opened.path is None else automatic_indexes(opened.path)
        for one in indexes:
            shutil.rmtree(one, ignore_errors=True)
    line = f"{removed} windows removed."
    if indexes:
        line = f"{removed} windows and {len(indexes)} indexes of documents removed."
    _print(json, line, {"removed": removed, "indexes": len(indexes)})


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
    shared: Store = None,
    json: options.Json = False,
) -> None:
    """Remove the windows of some passages or documents."""
    with _open(cache_dir, shared) as opened:
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
    shared: Store = None,
    older_than: Annotated[
        float | None,
        options.option(
            "DAYS", "Of the shared store, also remove windows that were written before.", min=0
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Remove windows that are outdated and, with --disk, those that do not fit."""
    if shared is not None and disk is not None:
        raise InputError("--disk limits a folder, not a shared store. Use --older-than for that.")
    if shared is None and older_than is not None:
        raise InputError("--older-than needs --shared. A folder has a limit, see --disk.")
    with _open(cache_dir, shared, **({} if disk is None else {"disk": disk})) as opened:
        removed = opened.prune(None if older_than is None else older_than * _DAY_S)
        held = _held(opened)
        if shared is None:
            done = opened.stats().tiers["disk"]
            removed = done.evictions + done.expired + done.quarantined
    line = (
        f"{removed} windows removed; {held['entries']} windows of {_size(held['bytes'])} are left."
    )
    _print(json, line, {"removed": removed, **held})


def _open(folder: str | None, shared: str | None, **sizes: Any) -> PassageCache:
    quieten(verbose=False)
    from rag_windows import PassageCache

    if shared is None:
        return PassageCache.default(folder, memory=None, **sizes)
    if folder is not None:
        raise InputError("--cache-dir and --shared exclude each other. Leave one of them out.")
    return PassageCache(None, shared=shared)


def _held(opened: PassageCache) -> dict[str, Any]:
    if opened.shared is not None:
        entries, size = opened.shared.contents()
        return {"shared": opened.shared.url, "entries": entries, "bytes": size}
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
