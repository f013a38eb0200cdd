"""The commands `rag-windows eval` and `rag-windows bench`."""

from __future__ import annotations

import typer

from rag_windows_eval.cli.app import evaluation
from rag_windows_eval.cli.bench import bench


def add(app: typer.Typer) -> None:
    """Add them to those of `rag-windows`; the entry point of the group `rag_windows.commands`."""
    app.command()(bench)
    app.add_typer(evaluation, name="eval")
