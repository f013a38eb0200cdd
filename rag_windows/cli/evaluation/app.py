"""The commands `rag-windows eval ...`."""

from __future__ import annotations

import typer

from rag_windows.cli.errors import Group
from rag_windows.cli.evaluation.chatrag_command import chatrag
from rag_windows.cli.evaluation.folder_commands import merge, report
from rag_windows.cli.evaluation.icl_command import icl
from rag_windows.cli.evaluation.inscit_command import inscit
from rag_windows.cli.evaluation.long_command import long
from rag_windows.cli.evaluation.score_commands import score

evaluation = typer.Typer(
    help="Compare methods on datasets: quality with intervals, speed, and a report.",
    cls=Group,
)
evaluation.command()(inscit)
evaluation.command()(chatrag)
evaluation.command()(icl)
evaluation.command()(long)
evaluation.add_typer(score, name="score")
evaluation.command()(merge)
evaluation.command()(report)
