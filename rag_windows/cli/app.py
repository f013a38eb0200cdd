"""Entry point of the command `rag-windows`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_PACKAGES = ("typer", "rich", "bm25s")


def main() -> None:
    """Run the command line and end the process.

    Exit codes: 0, 2 for an error of use (one line on stderr), 130 for Ctrl-C.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        print(
            f"Error: the command line needs {', '.join(missing)}, not installed here; "
            'run: pip install "rag-windows[cli]"',
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        from rag_windows.cli.commands import app
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="rag-windows")


if __name__ == "__main__":
    main()
