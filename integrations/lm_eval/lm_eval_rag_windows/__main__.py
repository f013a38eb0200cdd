"""The harness's own command line, with the model `rag-windows` registered.

``python -m lm_eval_rag_windows ...`` takes exactly what ``lm_eval ...`` takes.
"""

from __future__ import annotations

import sys

from lm_eval import __main__ as harness

from rag_windows.errors import RagWindowsError


def main() -> None:
    """Run it on this process's arguments; exit code 2 and one line for an error of use."""
    try:
        harness.cli_evaluate()
    except RagWindowsError as error:
        from rag_windows.integration import one_line

        print(f"Error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
