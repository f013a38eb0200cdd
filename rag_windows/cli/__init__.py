"""The command `rag-windows`: questions over documents from a terminal or a script.

Another distribution brings commands of its own by an entry point of the group
`rag_windows.commands`: a function that gets the `typer.Typer` of all commands and adds to it. What
such commands share with those of this package is listed in ``__all__`` and stays.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_windows.cli.options import (
        SAMPLE_MODEL,
        Json,
        LoadOptions,
        Model,
        RayOptions,
        SearchOptions,
        System,
        Verbose,
        count,
        default_instruction,
        flag,
        fleet_options,
        loaded_model,
        open_corpus,
        option,
        quieten,
        spreading,
    )
    from rag_windows.cli.render import (
        EXIT_ERROR,
        Group,
        console,
        plain_table,
        progress,
        show,
        tell,
        write_json,
    )

__all__ = [
    "EXIT_ERROR",
    "SAMPLE_MODEL",
    "Group",
    "Json",
    "Model",
    "LoadOptions",
    "RayOptions",
    "SearchOptions",
    "System",
    "Verbose",
    "console",
    "count",
    "flag",
    "fleet_options",
    "default_instruction",
    "loaded_model",
    "open_corpus",
    "option",
    "plain_table",
    "progress",
    "quieten",
    "show",
    "spreading",
    "tell",
    "write_json",
]


def __getattr__(name: str) -> Any:
    # On first use: without the extra `cli`, `__main__` has to say so before this needs it.
    if name in __all__:
        for module in ("options", "render"):
            home = import_module(f"{__name__}.{module}")
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
