"""What methods there are."""

from __future__ import annotations

from typing import Any

from rag_windows.cli import render
from rag_windows.cli.engine import parameters


def methods(as_json: bool) -> None:
    """Show every method with its formula, its parameters' defaults and its paper."""
    rows = method_rows()
    if as_json:
        render.write_json(rows)
    else:
        render.show_methods(render.console(), rows)


def method_rows() -> list[dict[str, Any]]:
    """One mapping a method: name, formula, parameters (with defaults) and paper."""
    from rag_windows.rescaling import METHODS

    return [
        {
            "name": kind.name,
            "formula": kind.formula,
            "parameters": parameters(kind),
            "paper": kind.paper,
        }
        for kind in METHODS.values()
    ]
