"""The command `rag-windows bench`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated

from pydantic import TypeAdapter

from rag_windows.cli import Verbose, count, option, quieten, spreading, tell
from rag_windows_eval.benchmark.result import BenchPlan, Result, markdown
from rag_windows_eval.files import write_whole


@spreading()
def bench(
    plan: BenchPlan,
    threads: Annotated[int | None, count("Number of CPU threads. Default: all.")] = None,
    out: Annotated[
        str | None, option("DIR", "Folder for performance.json and performance.md (or profile.md).")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Compare the speed of windows and of plain transformers over the same tokens."""
    quieten(verbose)
    import torch

    from rag_windows.loading import best_device, check_device
    from rag_windows_eval.benchmark.run import check, profiled, run

    check_device(plan.device, "--device ")
    if plan.device == "auto":
        plan = dataclasses.replace(plan, device="cpu" if best_device() == "cpu" else "cuda")
    check(plan)
    if threads is not None:
        torch.set_num_threads(threads)
    if plan.profile:
        found = profiled(plan)
        print(found)
        if out is not None:
            write_whole(Path(out) / "profile.md", found)
            tell(f"Wrote profile.md to {out}.")
        return
    result = run(plan, shlex.join(["rag-windows", *sys.argv[1:]]), tell)
    print(markdown(result))
    if out is not None:
        written = TypeAdapter(Result).dump_json(result, indent=1).decode()
        write_whole(Path(out) / "performance.json", f"{written}\n")
        write_whole(Path(out) / "performance.md", markdown(result))
        tell(f"Wrote performance.json and performance.md to {out}.")
