"""The training curve: loss, and right answers of each level, over steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from training.levels import Level


def draw_curve(progress: Path, image: Path, levels: Sequence[Level]) -> None:
    """Draws the trainer's progress.jsonl to `image` (PNG); nothing where there is none yet."""
    if not progress.exists():
        return
    rows = [json.loads(line) for line in progress.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.semilogy(
        [row["step"] for row in rows], [row["loss"] for row in rows], color="black", linewidth=0.8
    )
    above.set_ylabel("loss on answers")
    for number, level in enumerate(levels):
        points = [
            (row["step"], row["accuracy"][str(number)])
            for row in rows
            if str(number) in row["accuracy"]
        ]
        if points:
            colour = f"C{number % 10}"
            style = "-" if number < 10 else "--"
            below.plot(*zip(*points, strict=True), style, color=colour, label=level.recipe.label)
    below.set_ylabel("right answers")
    below.set_xlabel("steps")
    below.set_ylim(0, 1)
    if rows:
        below.legend(title="passages", fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(image, dpi=100)
