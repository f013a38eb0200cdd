"""Entry point of the command `rag-windows`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and end the process.

    Exit codes: 0, 2 for an error of use (one line on stderr), 130 for Ctrl-C.
    """
    try:
        from rag_windows.cli.commands import app
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="rag-windows")


if __name__ == "__main__":
    main()
