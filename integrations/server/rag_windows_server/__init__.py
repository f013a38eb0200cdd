"""An HTTP server with OpenAI's routes whose answers say which passages they read (extra `server`).

`create_app` makes the ASGI application of a loaded model, `Settings` say what requests may ask for,
`Keys` who may ask. `rag-windows serve` runs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_windows_server.app import create_app
    from rag_windows_server.keys import Keys, Tenant
    from rag_windows_server.settings import Settings

__all__ = ["Keys", "Settings", "Tenant", "create_app"]

_HOMES = {"create_app": "app", "Keys": "keys", "Tenant": "keys", "Settings": "settings"}


def __getattr__(name: str) -> Any:
    # On first use: who needs the settings or the keys alone loads no application.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
