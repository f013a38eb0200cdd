"""The command `rag-windows`: questions over documents from a terminal or a script.

Another distribution brings commands of its own by an entry point of the group
`rag_windows.commands`: a function that gets the `typer.Typer` of all commands and adds to it. What
such commands share with those of this package is listed in ``__all__`` and stays.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_windows.cli.corpus import SearchOptions, open_corpus, read_passages
    from rag_windows.cli.model_loading import (
        SAMPLE_MODEL,
        LoadOptions,
        default_instruction,
        instruction,
        loaded_model,
        quieten,
    )
    from rag_windows.cli.options import (
        Instruction,
        Json,
        Model,
        System,
        Verbose,
        count,
        flag,
        option,
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
    from rag_windows.cli.replicas import RayOptions, fleet_options

__all__ = [
    "EXIT_ERROR",
    "SAMPLE_MODEL",
    "Group",
    "Instruction",
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
    "instruction",
    "default_instruction",
    "loaded_model",
    "open_corpus",
    "option",
    "plain_table",
    "progress",
    "quieten",
    "read_passages",
    "show",
    "spreading",
    "tell",
    "write_json",
]


def __getattr__(name: str) -> Any:
    # On first use: without the extra `cli`, `__main__` has to say so before this needs it.
    if name in __all__:
        for module in ("options", "model_loading", "corpus", "replicas", "render"):
            home = import_module(f"{__name__}.{module}")
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
