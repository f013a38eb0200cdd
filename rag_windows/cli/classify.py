"""Labels for texts, learnt from a file of demonstrations."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from rag_windows.cli import render
from rag_windows.cli.engine import ModelOptions, closing_cache, load_model
from rag_windows.cli.progress import Progress
from rag_windows.errors import InputError
from rag_windows.prompt.visible_text import encodable, one_line

if TYPE_CHECKING:
    from rag_windows.icl import Classification, Demonstration
    from rag_windows.model import ClassifyOptions as Keywords


@dataclass(frozen=True, slots=True)
class ClassifyOptions:
    """How texts are labelled, and how that is shown."""

    labels: Sequence[str] | None = None
    template: str | None = None
    normalize: Literal["sum", "mean"] = "sum"
    calibrate_with: Sequence[str] = ()
    windows: int | None = None
    window_tokens: int | None = None
    system: str | None = None
    as_json: bool = False

    def keywords(self) -> Keywords:
        """Keyword arguments of `WindowedLM.classify`."""
        return {
            "template": None if self.template is None else encodable(self.template),
            "prefix": None if self.system is None else encodable(self.system),
            "normalize": self.normalize,
            "calibrate_with": [encodable(text) for text in self.calibrate_with],
            "windows": self.windows,
            "window_tokens": self.window_tokens,
        }


def classify(
    texts: Sequence[str], demos: str, options: ClassifyOptions, model: ModelOptions
) -> None:
    """Label texts and show the label of each with its probability.

    Raises:
        RagWindowsError: see `read_demonstrations`, `load_model` and `WindowedLM.classify`.
    """
    shown = read_demonstrations(demos)
    asked = [encodable(text) for text in texts]
    labels = None if options.labels is None else [encodable(label) for label in options.labels]
    progress = Progress()
    lm = load_model(model, progress)
    begun = time.perf_counter()
    with closing_cache(lm), progress.waiting("Reading the demonstrations"):
        found = lm.classify(asked, shown, labels, **options.keywords())
    seconds = time.perf_counter() - begun
    if options.as_json:
        render.write_json(
            {
                "texts": [_row(one) for one in found],
                "demonstrations": len(shown),
                "windows": found[0].windows,
                "seconds": seconds,
                "method": lm.method.name,
                "model": model.model,
            }
        )
        return
    _show(found)
    windows = f"{found[0].windows} window{'s' * (found[0].windows != 1)}"
    render.console().print(
        f"{model.model}, {lm.method.name}: {len(shown)} demonstrations in {windows}, "
        f"{seconds:.2f} s.",
        style="dim",
        soft_wrap=True,
    )


def read_demonstrations(path: str) -> list[Demonstration]:
    """Demonstrations of a JSONL file; blank lines count for nothing.

    Raises:
        InputError: the file can't be read, or naming the line that is no demonstration.
    """
    from rag_windows.icl.demonstrations import demonstrations_of

    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read as a text of UTF-8: {error}.") from error
    made = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            made += demonstrations_of([json.loads(line)])
        except (ValueError, RecursionError, InputError) as error:
            raise InputError(
                f'{path}, line {number}: no object such as {{"text": "...", "label": "..."}}: '
                f"{error}"
            ) from error
    if not made:
        raise InputError(f"{path} holds no demonstrations.")
    return made


def _row(one: Classification) -> dict[str, Any]:
    return {
        "text": one.text,
        "label": one.label,
        "probabilities": dict(one.probabilities),
        "scores": dict(one.scores),
    }


def _show(found: Sequence[Classification]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("label")
    table.add_column("", justify="right", no_wrap=True, min_width=len("100%"))
    table.add_column("text", no_wrap=True, overflow="ellipsis", style="dim")
    for one in found:
        table.add_row(
            Text(one_line(one.label), style="bold"),
            f"{one.probabilities[one.label]:.0%}",
            Text(one_line(one.text)),
        )
    render.console().print(table)
