"""The training curve: loss, and right answers of each level, over minutes."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

from training.curriculum import LEVELS


def draw_curve(progress: Path, image: Path) -> None:
    """Draws the trainer's progress.jsonl to `image` (PNG); nothing where there is none yet."""
    if not progress.exists():
        return
    rows = [json.loads(line) for line in progress.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    minutes = [row["minutes"] for row in rows]
    above.semilogy(minutes, [row["loss"] for row in rows], color="black", linewidth=0.8)
    above.set_ylabel("loss on answers")
    for level, recipe in enumerate(LEVELS):
        points = [
            (row["minutes"], row["accuracy"][str(level)])
            for row in rows
            if str(level) in row["accuracy"]
        ]
        if points:
            wide = " wide" if recipe.follow else ""
            below.plot(*zip(*points, strict=True), label=f"{recipe.entities}{wide}")
    below.set_ylabel("right answers")
    below.set_xlabel("minutes")
    below.set_ylim(0, 1)
    if rows:
        below.legend(title="passages", fontsize=7)
    figure.savefig(image, dpi=100)
