"""The command `bench`: windows timed beside plain transformers."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter

from rag_windows.benchmark.result import Plan, Result, markdown
from rag_windows.cli import options
from rag_windows.cli.options import quieten
from rag_windows.cli.render import tell
from rag_windows.evaluation.files import write_whole

Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="On the CPU. Default: all.")]
Out = Annotated[
    str | None, typer.Option(metavar="DIR", help="Writes performance.json and .md there.")
]


@options.spreading()
def bench(
    plan: Plan, threads: Threads = None, out: Out = None, verbose: options.Verbose = False
) -> None:
    """Time windows beside plain transformers, the same tokens for both, on any weights."""
    quieten(verbose)
    import torch

    from rag_windows.benchmark.run import check, run
    from rag_windows.loading import best_device, check_device

    check_device(plan.device, "--device ")
    if plan.device == "auto":
        plan = dataclasses.replace(plan, device="cpu" if best_device() == "cpu" else "cuda")
    check(plan)
    if threads is not None:
        torch.set_num_threads(threads)
    result = run(plan, shlex.join(["rag-windows", *sys.argv[1:]]), tell)
    print(markdown(result))
    if out is not None:
        found = TypeAdapter(Result).dump_json(result, indent=1).decode()
        write_whole(Path(out) / "performance.json", f"{found}\n")
        write_whole(Path(out) / "performance.md", markdown(result))
        tell(f"{out}: performance.json and performance.md")
