"""The commands `rag-windows cache ...` and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from rag_windows.cli import options
from rag_windows.cli.errors import Group

cache = typer.Typer(
    help="Look after the passage cache: what was encoded once is read from disk afterwards.",
    cls=Group,
)

Limit = Annotated[
    str | None,
    typer.Option(
        "--disk",
        metavar="SIZE",
        help='Drop what is worth least until all fits, such as "10GiB".',
        show_default=False,
    ),
]


@cache.command()
def stats(cache_dir: options.CacheDir = None, json: options.Json = False) -> None:
    """Show the folder, and how many windows of how many bytes it holds."""
    from rag_windows.cli.cache import show_stats as run

    run(cache_dir, as_json=json)


@cache.command()
def warm(
    docs: options.Docs = None,
    strict: options.Strict = False,
    model: options.ReaderModel = None,
    cache_dir: options.CacheDir = None,
    system: options.System = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    passage_words: options.PassageWords = 120,
    max_window_tokens: options.MaxWindowTokens = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Encode documents ahead of the questions; goes on where it was interrupted.

    Give the model, the instruction (--system) and the lengths that the questions will have.
    """
    from rag_windows.cli.cache import warm as run
    from rag_windows.cli.corpus import SearchOptions
    from rag_windows.cli.engine import ModelOptions, reader_model

    run(
        SearchOptions(docs, words=passage_words, strict=strict),
        system,
        ModelOptions(
            reader_model(model, docs),
            device=device,
            dtype=dtype,
            max_window_tokens=max_window_tokens,
            verbose=verbose,
            cache=True,
            cache_dir=cache_dir,
        ),
        as_json=json,
    )


@cache.command()
def verify(cache_dir: options.CacheDir = None, json: options.Json = False) -> None:
    """Read every window and put aside those that can't be proved right."""
    from rag_windows.cli.cache import verify as run

    run(cache_dir, as_json=json)


@cache.command()
def clear(cache_dir: options.CacheDir = None, json: options.Json = False) -> None:
    """Forget all windows of all models."""
    from rag_windows.cli.cache import clear as run

    run(cache_dir, as_json=json)


@cache.command()
def invalidate(
    ids: Annotated[list[str], typer.Argument(help="Ids of passages or documents.")],
    every_tenant: Annotated[
        bool,
        typer.Option(
            "--every-tenant",
            help="What is named are digests of ids or names of entries' files, of any tenant; "
            "without this, ids of windows that were stored without a salt.",
        ),
    ] = False,
    cache_dir: options.CacheDir = None,
    json: options.Json = False,
) -> None:
    """Forget the windows of some passages or documents."""
    from rag_windows.cli.cache import invalidate as run

    run(ids, cache_dir, every_tenant=every_tenant, as_json=json)


@cache.command()
def prune(
    cache_dir: options.CacheDir = None, disk: Limit = None, json: options.Json = False
) -> None:
    """Drop windows that are outdated, and with --disk those that do not fit."""
    from rag_windows.cli.cache import prune as run

    run(cache_dir, disk, as_json=json)
