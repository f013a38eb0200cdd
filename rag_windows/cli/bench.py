"""The command `bench`: windows timed beside plain transformers."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter

from rag_windows.benchmark.result import Plan, Result, changes, draw, markdown
from rag_windows.cli import options
from rag_windows.cli.errors import tell
from rag_windows.cli.models import choose_device, quieten

PARTIAL = "performance.partial.json"

Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="On the CPU. Default: all.")]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Writes performance.json, .md and .png there; the same call goes on after a kill.",
    ),
]
Compare = Annotated[
    str | None, typer.Option(metavar="FILE", help="An older performance.json: what moved.")
]


@options.spreading()
def bench(
    plan: Plan,
    threads: Threads = None,
    out: Out = None,
    compare: Compare = None,
    verbose: options.Verbose = False,
) -> None:
    """Time windows beside plain transformers, the same tokens for both, on any weights."""
    quieten(verbose)
    import torch

    from rag_windows.benchmark.run import check, run
    from rag_windows.evaluation.files import read, write_whole
    from rag_windows.evaluation.machine import lock_folder

    chosen = choose_device(plan.device)
    plan = dataclasses.replace(plan, device="cuda" if chosen == "auto" else chosen)
    check(plan)
    older = None if compare is None else read(compare).json(Result)
    if threads is not None:
        torch.set_num_threads(threads)
    command = shlex.join(["rag-windows", *sys.argv[1:]])
    if out is None:
        result = run(plan, command, tell)
        print(markdown(result))
    else:
        folder = Path(out)
        with lock_folder(folder):
            result = run(plan, command, tell, folder / PARTIAL)
            print(markdown(result))
            found = TypeAdapter(Result).dump_json(result, indent=1).decode()
            write_whole(folder / "performance.json", f"{found}\n")
            write_whole(folder / "performance.md", markdown(result))
            draw(result, folder / "performance.png")
            tell(f"{folder}: performance.json, performance.md and performance.png")
            (folder / PARTIAL).unlink(missing_ok=True)
    if older is not None:
        print(f"### What moved\n\n{changes(older, result)}")
