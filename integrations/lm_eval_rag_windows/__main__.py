"""The harness's own command line, with the model `rag-windows` registered.

``python -m lm_eval_rag_windows ...`` takes exactly what ``lm_eval ...`` takes.
"""

from __future__ import annotations

import sys

from rag_windows.errors import RagWindowsError


def main() -> None:
    """Run the harness's command line on this process's arguments.

    Exit codes: the harness's own; 2 for an error of use (one line on stderr).
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        import lm_eval_rag_windows  # noqa: F401  # registers the model

        cli_evaluate()
    except RagWindowsError as error:
        from rag_windows.integration import one_line

        print(f"Error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
