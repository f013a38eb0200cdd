"""Text of others as a report shows it: without hidden characters, and never longer than told."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rag_windows.prompt.visible_text import one_line, visible

TEXT = 2000
"""Characters of a passage, a message or an answer that are shown."""

LEAD = 320
"""Characters of a passage that stand before the fold."""

_LEAST = 0.00005
_NO_CHARACTERS = re.compile("[\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class Shown:
    """A text, or its beginning.

    Attributes:
        text: with control characters spelled out.
        note: says what is left out; empty where nothing is.
    """

    text: str
    note: str = ""


def shown(text: str, longest: int = TEXT) -> Shown:
    """The beginning of a text, with a note where it is not the whole."""
    note = ""
    if len(text) > longest:
        note = f"shown: the first {longest:,} of {len(text):,} characters"
    return Shown(harmless(text[:longest]), note)


def harmless(text: str) -> str:
    """Spell out control characters, and replace what XML can't hold."""
    return visible(_NO_CHARACTERS.sub("\ufffd", text))


def name(text: str, longest: int = 120) -> str:
    """A name of others on one line; an ellipsis says that it goes on."""
    cut = one_line(_NO_CHARACTERS.sub("\ufffd", text[: 4 * longest]))
    return cut if len(cut) <= longest else cut[: longest - 1] + "…"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a passage inside one window, or in none.

    Attributes:
        text: shown form.
        window: its number from 1; None outside every window.
        begins: whether the window begins here.
    """

    text: str
    window: int | None
    begins: bool


def segments(
    text: str, spans: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[Segment, ...]:
    """Cut a stretch of a text where windows begin and end.

    Args:
        text: whole.
        spans: what each window holds, in characters, end exclusive; those that reach beyond the
            text are shortened, and where two overlap the first one counts.
        start: of the stretch.
        end: likewise, exclusive.
    """
    end = min(end, len(text))
    # A window that begins beyond the stretch has no say in it, and there may be many.
    near = [(n, a, b) for n, (a, b) in enumerate(spans, start=1) if a < end and b > start]
    edges = {start, end}
    edges.update(edge for _, a, b in near for edge in (a, b) if start < edge < end)
    ordered = sorted(edges)
    found: list[Segment] = []
    seen: set[int] = set()
    for left, right in pairwise(ordered):
        inside = next(((n, a) for n, a, b in near if a <= left and b >= right), None)
        if inside is None:
            found.append(Segment(harmless(text[left:right]), None, begins=False))
            continue
        window, begun = inside
        new = window not in seen and begun >= start
        seen.add(window)
        found.append(Segment(harmless(text[left:right]), window, begins=new))
    return tuple(found)


def number(value: float | None, digits: int = 1) -> str:
    """Fixed digits; a dash for what is not there."""
    if value is None or not math.isfinite(value):
        return "–"
    # No "-0.0".
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def chance(value: float | None) -> str:
    """A p-value, as "p = 0.41" has it."""
    if value is None or not math.isfinite(value):
        return "–"
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def share(value: float | None) -> str:
    """Percent of a share from 0 to 1."""
    if value is None or not math.isfinite(value):
        return "–"
    if 0 < value < _LEAST:
        return "< 0.01%"
    return f"{100 * value:.2f}%" if 0 < value < 0.01 else f"{100 * value:.1f}%"


def some(count: int, one: str, many: str | None = None) -> str:
    """A number with its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """A list in words; a long one says how many it doesn't name."""
    if len(names) > most:
        return ", ".join(names[:most]) + f" and {len(names) - most:,} more"
    return ", ".join(names)
