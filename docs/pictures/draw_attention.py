"""Draws docs/pictures/attention.png: who reads whom, in one prompt and with windows.

The pattern is measured, not drawn by hand: a small random model runs through the engine, one token
is changed at a time, and a cell is coloured where that token changed what the row computed.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from transformers import LlamaConfig, LlamaForCausalLM

from rag_windows import APE, Sequential, WindowedLM
from rag_windows.methods import Method

TARGET = Path(__file__).with_name("attention.png")
PREFIX, WINDOWS, QUERY = 3, (6, 4, 7), 5
NAMES = ("prefix", "passage 1", "passage 2", "passage 3", "question")
COLOURS = ("#7f7f7f", "#0072b2", "#e69f00", "#009e73", "#cc3377")
EMPTY = "#f3f3f3"
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


def positions(windowed: bool) -> list[int]:
    """Position of each token."""
    if not windowed:
        return list(range(PREFIX + sum(WINDOWS) + QUERY))
    start = PREFIX + max(WINDOWS)
    windows = [PREFIX + i for length in WINDOWS for i in range(length)]
    return [*range(PREFIX), *windows, *range(start, start + QUERY)]


def draw(axes: Axes, grid: Grid, title: str, places: list[int]) -> None:
    """One matrix with its segments named on both sides and its positions below."""
    count = len(grid)
    axes.imshow(grid, cmap=ListedColormap([EMPTY, *COLOURS]), vmin=0, vmax=len(COLOURS))
    axes.set_xticks(np.arange(-0.5, count), minor=True)
    axes.set_yticks(np.arange(-0.5, count), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0)
    for part in segments()[1:]:
        axes.axhline(part.start - 0.5, color="#333333", linewidth=0.8)
        axes.axvline(part.start - 0.5, color="#333333", linewidth=0.8)
    axes.set_xticks(range(count), [str(place) for place in places], fontsize=6.5)
    axes.set_yticks([])
    for part, name, colour in zip(segments(), NAMES, COLOURS, strict=True):
        middle = (part.start + part.stop - 1) / 2
        label = name.replace(" ", "\n")
        axes.text(middle, -0.8, label, ha="center", va="bottom", color=colour, fontsize=10)
        axes.text(-0.9, middle, label, ha="right", va="center", color=colour, fontsize=10)
    axes.set_xlabel("position of the token that is read", fontsize=10)
    axes.set_title(title, fontsize=12, pad=42)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main() -> None:
    """Measure both patterns and write the picture."""
    lm = tiny_model()
    mpl.rcParams["font.family"] = "DejaVu Sans"
    figure = Figure(figsize=(12, 6.7))
    figure.subplots_adjust(left=0.07, right=0.985, top=0.86, bottom=0.06, wspace=0.17)
    left, right = figure.subplots(1, 2)
    draw(
        left,
        pattern(lm, Sequential()),
        "Sequential: one prompt,\na passage reads all passages before it",
        positions(windowed=False),
    )
    draw(
        right,
        pattern(lm, APE()),
        "Windows: a passage reads the prefix and itself,\n"
        "the question reads everything, rescaled in the frame",
        positions(windowed=True),
    )
    first, last, question = segments()[1], segments()[-2], segments()[-1]
    right.add_patch(
        Rectangle(
            (first.start - 0.5, question.start - 0.5),
            last.stop - first.start,
            QUERY,
            fill=False,
            edgecolor="black",
            linewidth=3,
            zorder=3,
        )
    )
    figure.savefig(TARGET, dpi=150, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    main()
