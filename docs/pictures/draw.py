"""Draws the pictures of README and docs into this folder (``make figures``).

What they show is measured where it can be: a small random model or the shipped reader runs through
the engine. Each picture is little wider than a phone, so that its letters stay large, and stands
on a light card of its own, so that it can be read on dark pages as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from transformers import LlamaConfig, LlamaForCausalLM

from rag_windows import APE, Method, Sequential, WindowedLM
from rag_windows.samples import samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

FOLDER = Path(__file__).parent
PREFIX, WINDOWS, QUERY = 3, (6, 4, 7), 5
NAMES = ("prefix", "passage 1", "passage 2", "passage 3", "question")
COLOURS = ("#7f7f7f", "#0072b2", "#d98f00", "#009e73", "#cc3377")
EMPTY, INK, CARD = "#eeeeee", "#222222", "#ffffff"
WIDTH = 5.4
"""Inches: 518 pixels in a browser."""
VOCABULARY = 64

Grid = npt.NDArray[np.int64]


def tiny_model() -> WindowedLM:
    """A random Llama: who reads whom does not depend on its weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return WindowedLM.from_pretrained(LlamaForCausalLM(config).eval())


def segments() -> list[slice]:
    """Where prefix, windows and query lie among all tokens."""
    ends = list(accumulate((PREFIX, *WINDOWS, QUERY)))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def computed(lm: WindowedLM, method: Method, tokens: list[int]) -> torch.Tensor:
    """One vector per token: the last layer's keys, and the logits for the question's tokens.

    Returns:
        (tokens, features); keys of the second layer show what the first layer's attention read.
    """
    parts = [tokens[part] for part in segments()]
    context = lm.encode_ids(parts[0], parts[1:-1], method=method)
    rows = [lm.logits(context, parts[-1])]
    windows = [*([context.prefix] if context.prefix else []), *context.each]
    rows = [*(window.keys[-1].transpose(0, 1).flatten(1) for window in windows), *rows]
    width = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])


def pattern(lm: WindowedLM, method: Method) -> Grid:
    """(rows, keys): 0 where a row does not read a key, else 1 + the number of the key's segment."""
    generator = torch.Generator().manual_seed(1)
    count = PREFIX + sum(WINDOWS) + QUERY
    tokens = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
    before = computed(lm, method, tokens)
    grid = np.zeros((count, count), dtype=np.int64)
    for number, part in enumerate(segments(), start=1):
        for key in range(part.start, part.stop):
            changed = list(tokens)
            changed[key] = (changed[key] + 1) % VOCABULARY
            read = (computed(lm, method, changed) != before).any(dim=1).numpy()
            grid[read, key] = number
    return grid


def card(height: float) -> tuple[Figure, Axes]:
    """A light card with round corners, and axes over all of it in inches from the upper left."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    corner = 0.12
    inside = FancyBboxPatch(
        (corner, corner),
        WIDTH - 2 * corner,
        height - 2 * corner,
        boxstyle=f"round,pad={corner}",
        facecolor=CARD,
        edgecolor="none",
    )
    axes.add_patch(inside)
    return figure, axes


def text(axes: Axes, x: float, y: float, said: str, **options: Any) -> None:
    """Words that begin at x; y is their middle."""
    defaults: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": 12, "color": INK}
    axes.text(x, y, said, **{**defaults, **options})


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    """A filled rectangle whose upper left corner is (x, y)."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=CARD, linewidth=1))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From one point to another."""
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)


def legend(axes: Axes, y: float) -> None:
    """The colours of the segments, in one line."""
    for x, name, colour in zip((0.28, 1.08, 2.13, 3.18, 4.23), NAMES, COLOURS, strict=True):
        box(axes, x, y - 0.08, 0.16, 0.16, colour)
        text(axes, x + 0.21, y, name, fontsize=11)


def runs(cells: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Row, first column and length of each run of true cells within a row."""
    for row, line in enumerate(cells):
        column = 0
        for value, group in groupby(line):
            length = len(list(group))
            if value:
                yield row, column, length
            column += length


def attention() -> Figure:
    """Who reads whom, in one prompt and with windows; measured."""
    lm = tiny_model()
    figure, axes = card(3.5)
    size = 2.3
    cell = size / (PREFIX + sum(WINDOWS) + QUERY)
    strip = 0.08
    titles = ("One prompt", "Windows")
    for left, title, method in zip((0.3, 2.9), titles, (Sequential(), APE()), strict=True):
        top = 0.62
        text(axes, left + size / 2, 0.3, title, ha="center", fontsize=13, weight="bold")
        for part, colour in zip(segments(), COLOURS, strict=True):
            start, length = part.start * cell, (part.stop - part.start) * cell
            box(axes, left + start, top - strip - 0.03, length, strip, colour)
            box(axes, left - strip - 0.03, top + start, strip, length, colour)
        grid = pattern(lm, method)
        box(axes, left, top, size, size, EMPTY)
        for number, colour in enumerate(COLOURS, start=1):
            for row, column, length in runs(grid == number):
                box(axes, left + column * cell, top + row * cell, length * cell, cell, colour)
        for line in range(1, len(grid)):
            axes.hlines(top + line * cell, left, left + size, color=CARD, linewidth=0.7)
            axes.vlines(left + line * cell, top, top + size, color=CARD, linewidth=0.7)
    first, last, question = segments()[1], segments()[-2], segments()[-1]
    corner = left + first.start * cell, top + question.start * cell
    across, down = (last.stop - first.start) * cell, QUERY * cell
    axes.add_patch(
        Rectangle(corner, across, down, fill=False, edgecolor=INK, linewidth=2.2, zorder=3)
    )
    legend(axes, 3.2)
    return figure


def positions() -> Figure:
    """At which positions prefix, passages and question stand; those of the engine."""
    figure, axes = card(3.2)
    left, unit = 0.35, 4.7 / (PREFIX + sum(WINDOWS) + QUERY)

    def bar(y: float, start: int, length: int, number: int) -> None:
        box(axes, left + start * unit, y, length * unit, 0.26, COLOURS[number])

    text(axes, left, 0.3, "One prompt", fontsize=13, weight="bold")
    for number, part in enumerate(segments()):
        bar(0.46, part.start, part.stop - part.start, number)
    context = tiny_model().encode_ids([1] * PREFIX, [[2] * length for length in WINDOWS])
    text(axes, left, 1.08, "Windows", fontsize=13, weight="bold")
    bar(1.24, 0, PREFIX, 0)
    for number, window in enumerate(context.each, start=1):
        bar(1.24 + 0.31 * (number - 1), window.start, window.end - window.start, number)
    bar(1.24, context.query_start, QUERY, len(NAMES) - 1)
    end = context.query_start + QUERY
    for position in (0, PREFIX, context.query_start, end):
        x = left + position * unit
        axes.plot((x, x), (1.2, 2.3), color=INK, linewidth=0.7, linestyle=":")
        text(axes, x, 2.42, str(position), ha="center", fontsize=11)
    x = left + (PREFIX + sum(WINDOWS) + QUERY) * unit
    text(axes, x, 0.84, str(PREFIX + sum(WINDOWS) + QUERY), ha="center", fontsize=11)
    text(axes, left + (end + 0.8) * unit, 2.42, "position", fontsize=11)
    legend(axes, 2.9)
    return figure


def merge() -> Figure:
    """How outputs and log-sum-exps of segments become one; the numbers follow from the logits."""
    logits = ((0.4, 0.1), (1.0, 0.7, 0.2), (2.4, 1.9, 0.3), (0.6, 0.2), (1.6, 1.1))
    lses = [math.log(sum(math.exp(one) for one in segment)) for segment in logits]
    total = sum(math.exp(lse) for lse in lses)
    weights = [math.exp(lse) / total for lse in lses]
    figure, axes = card(4.3)
    for number, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
        x = 0.3 + 0.98 * number
        middle = x + 0.44
        text(axes, middle, 0.32, name, ha="center", fontsize=11, color=colour, weight="bold")
        keys = len(logits[number])
        for key in range(keys):
            width = 0.88 / keys
            box(axes, x + key * width, 0.5, width, 0.3, colour)
        arrow(axes, (middle, 0.86), (middle, 1.12))
        text(axes, middle, 1.27, f"output $o_{number}$", ha="center", fontsize=11)
        text(axes, middle, 1.54, f"$l_{number}$ = {lses[number]:.2f}", ha="center", fontsize=11)
        arrow(axes, (middle, 1.72), (middle, 1.98))
        box(axes, x + 0.14, 2.98 - 1.9 * weights[number], 0.6, 1.9 * weights[number], colour)
        text(axes, middle, 3.13, f"$w_{number}$ = {weights[number]:.2f}", ha="center", fontsize=11)
    axes.plot((0.3, 5.1), (2.98, 2.98), color=INK, linewidth=0.8)
    axes.plot((1.3, 1.3, 4.1, 4.1), (3.28, 3.36, 3.36, 3.28), color=INK, linewidth=1)
    text(axes, 2.7, 3.53, "citations", ha="center", fontsize=12, weight="bold")
    said = "answer = $w_0 o_0 + w_1 o_1 + w_2 o_2 + w_3 o_3 + w_4 o_4$"
    text(axes, 2.7, 3.95, said, ha="center", fontsize=13)
    return figure


def reuse() -> Figure:
    """Which windows a second question finds in the cache."""
    figure, axes = card(2.8)
    shades = {"A": COLOURS[1], "B": COLOURS[2], "C": COLOURS[3], "D": COLOURS[4]}
    kept: set[str] = set()
    for y, title, asked in (
        (0.35, "First question, passages A, B, C", "ABC"),
        (1.7, "Second question, passages C, D, A", "CDA"),
    ):
        text(axes, 0.35, y, title, fontsize=12.5, weight="bold")
        for place, name in enumerate(asked):
            x = 0.35 + 1.6 * place
            box(axes, x, y + 0.2, 1.4, 0.42, shades[name])
            said = {"ha": "center", "color": "white", "fontsize": 13, "weight": "bold"}
            text(axes, x + 0.7, y + 0.41, name, **said)
            found = "from the cache" if name in kept else "encoded"
            text(axes, x + 0.7, y + 0.8, found, ha="center", fontsize=11.5)
        kept.update(asked)
    return figure


def citations() -> Figure:
    """The attention that passages got for one answer of the shipped reader; measured."""
    question = "Where was Valin Marby born?"
    documents = load_documents([samples_path() / "corpus"]).documents
    passages = BM25Retriever(split_documents(documents)).retrieve(question, 5)
    lm = WindowedLM.from_pretrained("tiny-reader", device_map="cpu", dtype="float32")
    answer = lm.generate(question, passages)
    rows = [
        (str(passage.title), citation.mass, COLOURS[1])
        for passage, citation in zip(passages, answer.citations or [], strict=True)
    ]
    rows.append(("question, answer", answer.query_mass or 0.0, COLOURS[4]))
    figure, axes = card(0.85 + 0.34 * len(rows))
    text(axes, 0.35, 0.35, question, fontsize=13, weight="bold")
    text(axes, 5.05, 0.35, answer.text.strip(), ha="right", fontsize=13, weight="bold")
    for number, (name, share, colour) in enumerate(rows):
        y = 0.8 + 0.34 * number
        text(axes, 0.35, y, name)
        box(axes, 1.95, y - 0.1, max(0.02, 4.4 * share), 0.2, colour)
        text(axes, 2.05 + 4.4 * share, y, f"{100 * share:.1f}%")
    return figure


PICTURES = {
    "attention": attention,
    "positions": positions,
    "merge": merge,
    "reuse": reuse,
    "citations": citations,
}
"""Each picture's name, and what draws it."""


def main() -> None:
    """Draw all of them, and README's in pixels too: not every page that shows it takes SVG."""
    # Letters become outlines, which look the same everywhere; ids do not change from run to run.
    mpl.rcParams["font.family"] = "DejaVu Sans"
    mpl.rcParams["svg.fonttype"] = "path"
    mpl.rcParams["svg.hashsalt"] = "rag-windows"
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(FOLDER / f"{name}.svg", transparent=True, metadata={"Date": None})
        if name == "attention":
            target = FOLDER / f"{name}.png"
            figure.savefig(target, dpi=200, transparent=True, metadata={"Software": None})


if __name__ == "__main__":
    main()
