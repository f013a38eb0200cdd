"""What a run found, in words and tables: for the terminal, for Markdown and for HTML."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rag_windows.evaluation.summary import ArmSummary, Estimate, Summary
from rag_windows.evaluation.task import Example
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


WORDS = frozenset({"arm", "base", "evidence", "kind", "run", "tokens of context"})
"""Columns that hold words; the others hold figures."""

LEVEL = 0.05
"""Of p after Holm's correction: what is called shown."""

_LONG = 8
"""Rows above which a table of parts is folded."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Strings in rows, of a kind that the templates have a caption for; folded where that helps."""

    kind: str
    frame: pd.DataFrame
    metric: str = ""
    folded: bool = False

    @property
    def markdown(self) -> Markup:
        """Aligned where it is read as plain text, too; names of others are escaped."""
        sides = ["left" if head in WORDS else "right" for head in self.frame.columns]
        frame = self.frame.map(name).map(escaped).rename(columns=escaped)
        made = frame.to_markdown(index=False, disable_numparse=True, colalign=sides)
        return Markup(made)  # noqa: S704 - escaped above


def tables(summary: Summary) -> Iterator[Table]:
    """Every table, in the order of a report."""
    if summary.compared:
        yield Table("quality", _quality(summary))
        found, main = _results(summary), summary.metrics[0]
        for place, metric in enumerate(summary.metrics):
            rows = found[
                (found["metric"] == metric) & (found["part"] == "") & (found["base"] != "")
            ]
            if len(rows):
                columns = ["arm", "difference, points", "kept, %", "p", "p (Holm)", "n", "base"]
                yield Table("base", rows[columns], metric, folded=place > 0)
        for part in ("kind", "evidence"):
            rows = found[(found["metric"] == main) & (found["part"] == part)]
            if len(rows):
                # By label, and the arms of each in their order.
                rows = pd.concat(own for _, own in rows.groupby("label", sort=False))
                rows = rows.rename(columns={"label": part})
                frame = rows[[part, "arm", "value, %", "kept, %", "n"]]
                yield Table(part, frame, main, folded=len(rows) > _LONG)
    speed = [
        {
            "arm": arm.name,
            "tokens of context": f"{one.above:,} to {one.up_to:,}",
            "median": number(one.tokens, 0),
            "cold, s": number(one.cold_s, 3),
            "warm, s": number(one.warm_s, 3),
            "cold / warm": number(one.cold_s / one.warm_s if one.warm_s else None),
            "contexts": f"{one.n:,}",
        }
        for arm in summary.arms
        for one in arm.speed
    ]
    if speed:
        yield Table("speed", pd.DataFrame(speed), folded=True)
    yield Table("work", _work(summary), folded=True)


def overview(runs: Sequence[Summary]) -> Table:
    """The quality of all arms of several runs."""
    titles = [f"{place}. {name(one.task)}" for place, one in enumerate(runs, start=1)]
    frame = pd.concat([_quality(one) for one in runs], keys=titles, names=["run"])
    return Table("runs", frame.reset_index("run").fillna("–"))


def _results(summary: Summary) -> pd.DataFrame:
    """Every figure in words: a row for each arm, metric and part of the questions ("" for all)."""
    rows = []
    for arm in summary.arms:
        parts = [("", "", arm.results)]
        parts += [("kind", one.label, one.results) for one in arm.kinds]
        parts += [("evidence", one.label, one.results) for one in arm.retrieval]
        for part, label, results in parts:
            for one in results:
                against = one.against
                row = {
                    "part": part,
                    "label": label,
                    "metric": one.metric,
                    "arm": arm.name,
                    "value, %": figure(one.estimate),
                    "difference, points": figure(getattr(against, "difference", None), signed=True),
                    "kept, %": figure(getattr(against, "retention", None)),
                    "p": chance(getattr(against, "p", None)),
                    "p (Holm)": chance(getattr(against, "p_holm", None)),
                    "n": f"{one.n:,}",
                    "base": against.base if against else "",
                }
                rows.append(row)
    return pd.DataFrame(rows)


def _quality(summary: Summary) -> pd.DataFrame:
    depths = {one.top_k: one for one in summary.retrieval}
    rows = []
    for arm in summary.arms:
        row = {"arm": arm.name}
        row |= {metric_name(one.metric): figure(one.estimate) for one in arm.results}
        if depths:
            found = depths.get(arm.top_k)
            row["evidence found, % of it"] = figure(getattr(found, "recall", None))
            row["questions with some found, %"] = figure(getattr(found, "hit", None))
        rows.append(row)
    return pd.DataFrame(rows)


def _work(summary: Summary) -> pd.DataFrame:
    counted = {
        "windows encoded": "windows_encoded",
        "windows reused": "windows_reused",
        "tokens read": "prompt_tokens",
        "of them cached": "cached_tokens",
        "tokens written": "completion_tokens",
        "passages left out": "left_out_passages",
        "answers cut off": "unfinished",
        "errors": "errors",
    }
    seconds = {"encoding, s": "encode_s", "first token, s": "ttft_s", "answer, s": "total_s"}
    rows = [
        {"arm": arm.name}
        | {head: f"{getattr(arm.counters, field):,}" for head, field in counted.items()}
        | {head: number(getattr(arm.times, field, None), 3) for head, field in seconds.items()}
        for arm in summary.arms
    ]
    return pd.DataFrame(rows)


def deepest(summary: Summary) -> list[ArmSummary]:
    """Each method's arm with the most passages, in the order of the run."""
    best: dict[str, ArmSummary] = {}
    for arm in summary.arms:
        known = best.setdefault(arm.label, arm)
        if (arm.top_k or math.inf) > (known.top_k or math.inf):
            best[arm.label] = arm
    return list(best.values())


def verdict(arm: ArmSummary, bases: Collection[str | None]) -> tuple[str, str]:
    """A sentence on one arm by the main metric, and its tone: better, worse, same or base."""
    result, label = arm.results[0], name(arm.name)
    metric, against = metric_name(result.metric), result.against
    if against is None:
        role = "what others are compared with" if arm.name in bases else "compared with nothing"
        return f"{label} is {role}: {metric} {figure(result.estimate)}.", "base"
    first = f"{label} keeps {figure(against.retention)} percent of {name(against.base)}'s {metric}"
    if not math.isfinite(against.retention.value):
        reached = figure(result.estimate)
        first = f"{label} has a {metric} of {reached}, {name(against.base)} none that could be kept"
    if against.p is None or against.p_holm is None or not math.isfinite(against.p):
        return f"{first}; the difference was not tested.", "same"
    tested = f"p {chance(against.p)}, corrected {chance(against.p_holm)}"
    if against.p_holm >= LEVEL:
        once = " once all arms are tested together" if against.p < LEVEL else ""
        return f"{first}; no difference shown{once} ({tested}).", "same"
    points = against.difference.value
    kind, tone = ("gain", "better") if points > 0 else ("loss", "worse")
    return f"{first}; a {kind} of {number(abs(points))} points is shown ({tested}).", tone


def terminal(summary: Summary) -> str:
    """A summary on one screen, as Markdown that is also plain text."""
    shown = []
    if summary.compared:
        found = _results(summary)
        first, *rest = summary.metrics
        main = found[(found["part"] == "") & (found["metric"] == first)]
        heads = {"arm": "arm", "value, %": f"{first} (95%)", "kept, %": "retention (95%)"}
        quality = main[[*heads, "p (Holm)"]].rename(columns=heads).reset_index(drop=True)
        cost = _work(summary)[["arm", "first token, s", "windows encoded", "windows reused"]]
        for place, arm in enumerate(summary.arms):
            # Without their intervals, which the report has.
            for metric, one in zip(rest, arm.results[1:], strict=True):
                quality.loc[place, metric] = number(one.estimate.value)
            if arm.speed:
                cost.loc[place, "cold, s"] = number(arm.cold_s, 3)
                cost.loc[place, "warm, s"] = number(arm.warm_s, 3)
        shown = [Table("", quality), Table("", cost.fillna("–"))]
    bases = list({arm.base: None for arm in summary.arms if arm.base})
    return rendered("terminal.md", summary=summary, tables=shown, bases=bases).strip()


def cells(examples: Sequence[Example], values: Sequence[float | None]) -> Table:
    """A sweep over sizes and places: a row a number of passages, a column a place of the needle."""
    frame = pd.DataFrame([one.details for one in examples]).assign(value=values)
    # A single passage stands everywhere, and is shown in the first column.
    depths = frame["depth"].astype(float)
    frame["depth"] = depths.fillna(depths.min()).fillna(0.0)
    found = frame.pivot_table(index="size", columns="depth", values="value").map(number)
    found.columns = [f"position {depth:.0%}" for depth in found.columns]
    return Table("", found.rename_axis("passages").reset_index().astype(str))
