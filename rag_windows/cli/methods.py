"""What methods there are."""

from __future__ import annotations

import sys
from typing import Any

from rag_windows.cli import render


def methods(as_json: bool, as_markdown: bool = False) -> None:
    """Show every method: its formula and paper, what it is, its parameters' defaults."""
    from rag_windows.methods.registry import markdown_table, method_rows

    if as_markdown:
        sys.stdout.write(markdown_table())
    elif as_json:
        render.write_json(json_rows())
    else:
        render.show_methods(render.console(), method_rows())


def json_rows() -> list[dict[str, Any]]:
    """One mapping a method: name, formula, summary, parameters (with defaults) and paper."""
    from rag_windows.methods.registry import method_rows

    return [
        {
            "name": row.name,
            "formula": row.formula,
            "summary": row.summary,
            "parameters": row.parameters,
            "paper": row.paper,
        }
        for row in method_rows()
    ]
