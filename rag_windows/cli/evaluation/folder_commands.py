"""The commands `rag-windows eval merge` and `rag-windows eval report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rag_windows.cli import options

MergedOut = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the whole run.")]
Folders = Annotated[
    list[Path], typer.Argument(metavar="FOLDER...", help="Folders that runs wrote.")
]
ReportOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Where the report goes. Default: the folder of the (first) run.",
        show_default=False,
    ),
]
MovedData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="The data file, where it does not lie any more where the run read it.",
        show_default=False,
    ),
]
Missing = Annotated[
    bool, typer.Option("--allow-missing", help="Join also where shards or answers are missing.")
]


def merge(
    out: MergedOut,
    folders: Folders,
    data: MovedData = None,
    allow_missing: Missing = False,
    json: options.Json = False,
) -> None:
    """Join the shards of a run and score the whole."""
    from rag_windows.cli.evaluation.folders import merge as run

    run(out, folders, data, allow_missing=allow_missing, as_json=json)


def report(
    folders: Folders,
    out: ReportOut = None,
    data: MovedData = None,
    json: options.Json = False,
) -> None:
    """Score runs again and write their report, several runs in one."""
    from rag_windows.cli.evaluation.folders import report as run

    run(folders, out, data, as_json=json)
