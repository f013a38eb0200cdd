"""Text of others as a report shows it, numbers in words, and the templates that hold the prose."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rag_windows.evaluation.summary import Estimate
from rag_windows.prompt.visible_text import one_line, visible

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


def harmless(text: str) -> str:
    """Spell out control characters, and replace what XML can't hold."""
    return visible(_NO_CHARACTERS.sub("\ufffd", text))


def name(text: str, longest: int = 120) -> str:
    """A name of others on one line; an ellipsis says that it goes on."""
    cut = harmless(one_line(text[: 4 * longest]))
    return cut if len(cut) <= longest else cut[: longest - 1] + "…"


def metric_name(metric: str) -> str:
    """Such as "response F1" of "response_f1"."""
    return name(" ".join(_WORDS.get(word, word) for word in metric.split("_")))


def number(value: float | None, digits: int = 1) -> str:
    """Fixed digits; a dash for what is not there."""
    if value is None or not math.isfinite(value):
        return "–"
    # No "-0.0".
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def figure(estimate: Estimate | None, *, signed: bool = False) -> str:
    """Such as "98.1 (95.2 to 101.3)"; with a plus before what is above zero if ``signed``."""
    if estimate is None:
        return "–"
    plus = "+" if signed and round(estimate.value, 1) > 0 else ""
    inside = f" ({number(estimate.low)} to {number(estimate.high)})" if estimate.bounded else ""
    return plus + number(estimate.value) + inside


def chance(value: float | None) -> str:
    """A p-value, as "p = 0.41" has it."""
    if value is None or not math.isfinite(value):
        return "–"
    if value < 0.001:
        return "< 0.001"
    return number(value, 3 if value < 0.1 else 2)


def share(value: float | None) -> str:
    """Percent of a share from 0 to 1."""
    if value is None:
        return "–"
    return "< 0.01%" if 0 < value < 0.00005 else f"{number(100 * value, 1 + (0 < value < 0.01))}%"


def some(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """A list in words; a long one says how many it doesn't name."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def rendered(template: str, **values: Any) -> str:
    """A template filled in, with every value escaped for HTML, or for Markdown in an ".md"."""
    made = Environment(
        loader=PackageLoader("rag_windows.evaluation.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_in_markdown if template.endswith(".md") else _in_html,
    )
    filters = (figure, listed, metric_name, name, number, share, some, verbatim)
    made.filters |= {one.__name__: one for one in filters}
    made.globals["zip"] = zip
    return made.get_template(template).render(**values)


def verbatim(text: str) -> Markup:
    """For an indented block of Markdown, which ends at no mark that its text may hold."""
    return Markup(harmless(text))  # noqa: S704 - only for such a block


def _in_html(value: Any) -> Any:
    # Jinja escapes what is no Markup.
    return value if isinstance(value, Markup) else harmless(str(value))


def _in_markdown(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(escaped(str(value)))  # noqa: S704 - escaped
