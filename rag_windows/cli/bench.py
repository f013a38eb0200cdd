"""A run of the benchmark, its table, and what it is compared with."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rag_windows.cli.errors import tell
from rag_windows.cli.models import choose_device, quieten

if TYPE_CHECKING:
    from rag_windows.benchmark.workload import Plan

PARTIAL = "performance.partial.json"


def bench(
    plan: Plan, *, threads: int | None, out: str | None, compare: str | None, verbose: bool
) -> None:
    """Run and print a Markdown table; write JSON, Markdown and a picture where asked.

    Args:
        plan: what to run; its device may be "auto".
        threads: of PyTorch, or None for its own choice.
        out: folder of the result and, until it is there, of the parts that are finished.
        compare: file of an older result.
        verbose: whether the libraries' warnings are shown.

    Raises:
        InputError: an unknown shape, way or method, windows that don't divide a context, a context
            that is longer than the model, or an unfinished run of other settings in the folder.
        DataError: the older result or an unfinished one can't be read.
    """
    quieten(verbose)
    import torch

    from rag_windows.benchmark.result import Result, changes, draw, markdown
    from rag_windows.benchmark.run import run
    from rag_windows.evaluation.folder_lock import lock_folder

    device = choose_device(plan.device)
    plan = dataclasses.replace(plan, device="cuda" if device == "auto" else device)
    plan.check()
    older = None if compare is None else Result.load(Path(compare))
    if threads is not None:
        torch.set_num_threads(threads)
    folder = None if out is None else Path(out)
    with ExitStack() as stack:
        partial_path = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_folder(folder))
            partial_path = folder / PARTIAL
        result = run(plan, shlex.join(["rag-windows", *sys.argv[1:]]), tell, partial_path)
        text = markdown(result)
        print(text)
        if folder is not None and partial_path is not None:
            result.save(folder / "performance.json")
            (folder / "performance.md").write_text(text, encoding="utf-8")
            draw(result, folder / "performance.png")
            for name in ("performance.json", "performance.md", "performance.png"):
                tell(f"{folder / name}")
            partial_path.unlink(missing_ok=True)
    if older is not None:
        print("\n".join(["### What moved", "", *changes(older, result)]))
