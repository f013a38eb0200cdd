"""A run's settings, as a report shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_windows.evaluation.report.reported import ReportedRun
from rag_windows.evaluation.report.shown import Shown, name, shown, some

_LONGEST = 20_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What was run.

    Attributes:
        head: names with values: task, model, arms, machine, date.
        every: all settings as JSON.
        command: that made the run; empty where it is not known.
    """

    head: tuple[tuple[str, str], ...]
    every: Shown
    command: Shown


def settings(run: ReportedRun) -> Settings:
    """From a run's manifest; what it doesn't hold is left out."""
    held, summary = run.settings, run.summary
    head = [
        ("task", summary.task),
        ("questions", _questions(run)),
        ("model", _model(held.get("model"))),
        ("arms", ", ".join(arm.name for arm in summary.arms)),
        ("retriever", _words(held.get("retriever"))),
        ("longest answer", _tokens(held.get("max_new_tokens"))),
        ("seed", _plain(held.get("seed"))),
        ("shard", _plain(held.get("shard"))),
        ("last answer", run.date),
        *_made(run.made_with),
    ]
    text = json.dumps(held, indent=1, ensure_ascii=False, default=str)
    return Settings(
        tuple((label, name(value, 400)) for label, value in head if value),
        shown(text, _LONGEST),
        shown(run.command, _LONGEST),
    )


def _questions(run: ReportedRun) -> str:
    summary = run.summary
    count = f"{summary.compared:,}"
    if summary.compared != summary.examples:
        count += f" of {summary.examples:,}"
    if summary.groups < summary.compared:
        turns = any(len(one.messages) > 1 for one in run.examples)
        count += f", from {some(summary.groups, 'conversation' if turns else 'group')}"
    return count


def _model(value: Any) -> str:
    if not isinstance(value, Mapping):
        return _plain(value)
    details = [_plain(value.get("dtype"))]
    if isinstance(digest := value.get("sha256"), str):
        details.append(f"weights {digest[:12]}")
    inside = ", ".join(filter(None, details))
    return _plain(value.get("name")) + (f" ({inside})" if inside else "")


def _tokens(value: Any) -> str:
    return f"{_plain(value)} tokens" if value is not None else ""


def _made(made: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Machine and versions; of a run that went on elsewhere, all of them."""
    names = dict.fromkeys(label for one in made for label in one)
    for label in sorted(names, key=lambda one: one != "machine"):
        yield label, "; then ".join(dict.fromkeys(_plain(one.get(label)) for one in made))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        told = ((key, _words(entry)) for key, entry in value.items())
        return ", ".join(f"{key} {words}" for key, words in told if words)
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | int):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)
