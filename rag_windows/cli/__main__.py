"""`python -m rag_windows.cli` is the command `rag-windows`."""

from rag_windows.cli.commands import app

app(prog_name="rag-windows")
