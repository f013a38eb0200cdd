"""`python -m rag_windows.cli` is the command `rag-windows`."""

from rag_windows.cli.app import main

main()
