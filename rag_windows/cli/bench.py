"""A run of the benchmark, its table, and what it is compared with."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rag_windows.cli.engine import choose_device, quieten
from rag_windows.cli.errors import tell
from rag_windows.errors import InputError

if TYPE_CHECKING:
    from rag_windows.benchmark.result import Result


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """As given on the command line; see `rag_windows.benchmark.run.Plan`."""

    shape: str
    contexts: tuple[int, ...]
    windows: tuple[int, ...]
    ragged: bool
    new_tokens: tuple[int, ...]
    questions: tuple[int, ...]
    rounds: int
    ways: tuple[str, ...]
    threads: int | None
    device: str
    dtype: str
    method: str
    out: str | None
    compare: str | None
    verbose: bool


def bench(options: BenchOptions) -> None:
    """Run and print a Markdown table; write JSON, Markdown and a picture where asked.

    Raises:
        InputError: an unknown shape, way or method, or windows that don't divide a context.
        DataError: the older result can't be read.
    """
    quieten(options.verbose)
    import torch

    from rag_windows.benchmark.change import changes
    from rag_windows.benchmark.load import lengths
    from rag_windows.benchmark.result import Result as Older
    from rag_windows.benchmark.run import WAYS, Plan, run
    from rag_windows.benchmark.shape import shape_named
    from rag_windows.benchmark.table import markdown
    from rag_windows.rescaling import resolve

    shape_named(options.shape)
    resolve(options.method)
    device = choose_device(options.device)
    if unknown := [way for way in options.ways if way not in WAYS]:
        raise InputError(f"--way {unknown[0]!r} is unknown; choose among {list(WAYS)}.")
    for context in options.contexts:
        for window in options.windows:
            lengths(context, window, ragged=False, seed=0)
    older = None if options.compare is None else Older.load(Path(options.compare))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    plan = Plan(
        shape=options.shape,
        dtype=options.dtype,
        device="cuda" if device == "auto" else device,
        contexts=options.contexts,
        windows=options.windows,
        ragged=options.ragged,
        tokens=options.new_tokens,
        rounds=options.rounds,
        ways=options.ways or WAYS,
        method=options.method,
        questions=options.questions,
    )
    result = run(plan, shlex.join(["rag-windows", *sys.argv[1:]]), tell)
    text = markdown(result)
    print(text)
    if options.out is not None:
        _write(result, text, Path(options.out))
    if older is not None:
        print("\n".join(["### What moved", "", *changes(older, result)]))


def _write(result: Result, text: str, folder: Path) -> None:
    from rag_windows.benchmark.plot import draw

    result.save(folder / "performance.json")
    (folder / "performance.md").write_text(text, encoding="utf-8")
    draw(result, folder / "performance.png")
    for name in ("performance.json", "performance.md", "performance.png"):
        tell(f"{folder / name}")
