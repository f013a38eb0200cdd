"""The command `rag-windows`, as which `python -m rag_windows.cli` runs, too."""

from __future__ import annotations

import sys

from rag_windows.errors import MissingExtraError, require


def main() -> None:
    """Run it; without the extra `cli`, say in one line how to install that."""
    try:
        what = "The command rag-windows"
        require(what, "bm25s", "rich", "typer", extra="cli")
    except MissingExtraError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    from rag_windows.cli.commands import app

    app(prog_name="rag-windows")


if __name__ == "__main__":
    main()
