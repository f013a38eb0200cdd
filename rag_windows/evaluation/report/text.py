"""Text of others as a report shows it, and numbers in words."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rag_windows.evaluation.statistics import Estimate
from rag_windows.prompt.visible_text import one_line, visible

TEXT = 2000
"""Characters of a passage, a message or an answer that are shown."""

_NO_CHARACTERS = re.compile("[\ufdd0-\ufdef\ufffe\uffff]")
# What begins anything in Markdown inside a line, or at its start; an address becomes a link by
# itself. An underscore between letters or digits begins nothing.
_MARKS = re.compile(
    r"[\\`*\[\]|~$!#]|(?<![^\W_])_|_(?![^\W_])|^[-+=]|(?<=^\d)[.)](?=\s|$)|:(?=//)|(?<=www)\.",
    re.I,
)
_WORDS = {"f1": "F1", "bleu": "BLEU", "chatrag": "ChatRAG", "mrr": "MRR"}


def escaped(text: str) -> str:
    """On one line, with nothing that Markdown or HTML would obey."""
    # An entity is text to every Markdown dialect; a backslash before "<" is not.
    plain = html.escape(harmless(one_line(text)), quote=False)
    return _MARKS.sub(lambda match: "\\" + match[0], " ".join(plain.split()))


@dataclass(frozen=True, slots=True)
class Shown:
    """A text, or its beginning with a note on what is left out."""

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


def metric_name(metric: str) -> str:
    """Such as "response F1" of "response_f1"."""
    return name(" ".join(_WORDS.get(word, word) for word in metric.split("_")))


def heading(metric: str) -> str:
    """The same with a capital."""
    words = metric_name(metric)
    return words[:1].upper() + words[1:]


def number(value: float | None, digits: int = 1) -> str:
    """Fixed digits; a dash for what is not there."""
    if value is None or not math.isfinite(value):
        return "–"
    # No "-0.0".
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def interval(estimate: Estimate) -> str:
    """Such as "95.2 to 101.3"."""
    return f"{number(estimate.low)} to {number(estimate.high)}"


def with_interval(estimate: Estimate, *, signed: bool = False) -> str:
    """Such as "98.1 (95.2 to 101.3)"; with a plus before what is above zero if ``signed``."""
    inside = f" ({interval(estimate)})" if estimate.bounded else ""
    plus = "+" if signed and round(estimate.value, 1) > 0 else ""
    return plus + number(estimate.value) + inside


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
    if 0 < value < 0.00005:
        return "< 0.01%"
    return f"{100 * value:.2f}%" if 0 < value < 0.01 else f"{100 * value:.1f}%"


def some(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """A list in words; a long one says how many it doesn't name."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
