"""The page at ``/``: it asks over the documents and shows what was read.

Three files and an icon, sent as they are: there is no build, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from rag_windows_server.routes import Served

_FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}

_HEADERS = {
    # Texts of strangers stand on this page. No script but its own can run, and it may ask nobody
    # but this server; strings never become markup.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _sends(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    body = files(__name__).joinpath(name).read_bytes()

    async def send(_: Request) -> Response:
        return Response(body, 200, _HEADERS, kind)

    return send


def routes(served: Served) -> APIRouter:
    """The page; its files need no key, and it asks for one where its questions need it."""
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in _FILES.items():
        router.add_route(path, _sends(name, kind), ["GET"])

    @router.get("/page/examples")
    async def examples(request: Request) -> tuple[str, ...]:
        served.tenant(request)
        return served.settings.examples

    return router
