"""The pages of the API: ``/openapi.json``, and ``/docs``, which reads it without any script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse

_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #8884;"
    "padding:.3rem .5rem;text-align:left;vertical-align:top}:root{color-scheme:light dark}"
)


def routes(app: FastAPI) -> APIRouter:
    """The page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def page() -> HTMLResponse:
        return HTMLResponse(_page(app.openapi()), headers=_POLICY)

    return router


def _page(api: Mapping[str, Any]) -> str:
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    shown = "\n".join(
        part
        for path, methods in api["paths"].items()
        for method, route in methods.items()
        for part in _route(path, method, route)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(api['info']['summary'])} The same for programs: "
        f'<a href="openapi.json">openapi.json</a>.</p>{shown}</body></html>'
    )


def _route(path: str, method: str, route: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(f'{method.upper()} {path}')}</code></h2>"
    yield f"<p>{escape(route.get('summary', ''))}.</p>"
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = content.get("schema", {})
    if not schema:
        return
    needed = schema.get("required", ())
    yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
    for name, field in schema["properties"].items():
        note = "required" if name in needed else ""
        kind = escape(" or ".join(_kinds(field)))
        yield f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{note}</td></tr>"
    yield "</table>"


def _kinds(field: Mapping[str, Any]) -> list[str]:
    """The names of a field's types."""
    if "anyOf" in field:
        return [kind for one in field["anyOf"] for kind in _kinds(one) if kind != "null"]
    if "enum" in field or "const" in field:
        return [repr(one) for one in field.get("enum", [field.get("const")])]
    return [str(field.get("type", "object"))]
