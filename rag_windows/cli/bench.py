"""A run of the benchmark, its table, and what it is compared with."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rag_windows.cli.engine import choose_device, quieten
from rag_windows.cli.errors import tell
from rag_windows.errors import InputError

if TYPE_CHECKING:
    from rag_windows.benchmark.plan import Plan
    from rag_windows.benchmark.result import Result

_JOURNAL = "performance.partial.jsonl"


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

    from rag_windows.benchmark.change import changes
    from rag_windows.benchmark.result import Result as Older
    from rag_windows.benchmark.run import run
    from rag_windows.benchmark.table import markdown
    from rag_windows.evaluation.folder_lock import lock_folder

    _check(plan)
    device = choose_device(plan.device)
    plan = dataclasses.replace(plan, device="cuda" if device == "auto" else device)
    if plan.profile and plan.device != "cpu":
        raise InputError("--profile takes a token apart on the CPU alone; leave it out.")
    older = None if compare is None else Older.load(Path(compare))
    if threads is not None:
        torch.set_num_threads(threads)
    folder = None if out is None else Path(out)
    with ExitStack() as stack:
        journal = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_folder(folder))
            journal = folder / _JOURNAL
        result = run(plan, shlex.join(["rag-windows", *sys.argv[1:]]), tell, journal)
        text = markdown(result)
        print(text)
        if folder is not None and journal is not None:
            _write(result, text, folder)
            journal.unlink(missing_ok=True)
    if older is not None:
        print("\n".join(["### What moved", "", *changes(older, result)]))


def _check(plan: Plan) -> None:
    """Refuse before any work what would fail behind it."""
    from rag_windows.benchmark.load import PREFIX_TOKENS, QUERY_TOKENS, lengths
    from rag_windows.benchmark.plan import WAYS
    from rag_windows.benchmark.shape import Pretrained, timed
    from rag_windows.methods import resolve

    shape = timed(plan.shape, plan.model)
    for method in (plan.method, *plan.against):
        resolve(method)
    if unknown := [way for way in plan.ways if way not in WAYS]:
        raise InputError(f"--way {unknown[0]!r} is unknown; choose among {list(WAYS)}.")
    for place in plan.places:
        lengths(place.context, place.window, ragged=False, seed=0)
    if plan.question_context is not None:
        lengths(plan.question_context, plan.windows[0], ragged=False, seed=0)
    positions = shape.positions if isinstance(shape, Pretrained) else None
    beside = PREFIX_TOKENS + QUERY_TOKENS + max(plan.tokens)
    longest = max((*plan.contexts, plan.question_context or 0))
    if positions is not None and longest + beside > positions:
        raise InputError(
            f"{shape.name} has {positions} positions, and transformers' one prompt over {longest} "
            f"tokens takes {longest + beside}; take a shorter --context."
        )


def _write(result: Result, text: str, folder: Path) -> None:
    from rag_windows.benchmark.plot import draw

    result.save(folder / "performance.json")
    (folder / "performance.md").write_text(text, encoding="utf-8")
    draw(result, folder / "performance.png")
    for name in ("performance.json", "performance.md", "performance.png"):
        tell(f"{folder / name}")
