"""One server over several machines or GPUs, by Ray Serve (extra `fleet`).

`app` builds the application for ``serve run`` and Serve's config files from `FleetOptions`;
``rag-windows serve --replicas N`` starts it. Each reader is one loaded model behind the whole
application of `rag_windows_server`; a front takes the requests and passes them on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rag_windows.errors import require

if TYPE_CHECKING:
    from rag_windows_server.fleet.front import app, run
    from rag_windows_server.fleet.options import FleetOptions

__all__ = ["FleetOptions", "app", "run"]

_HOMES = {"FleetOptions": "options", "app": "front", "run": "front"}


def __getattr__(name: str) -> Any:
    # On first use: without the extra, the error names what is missing and the command for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    needed = ("ray", "fastapi", "uvicorn", "openai", "prometheus-client", "watchfiles", "fsspec")
    require("A fleet", *needed, extra="fleet")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
