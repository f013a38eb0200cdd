"""Invented conversations in the datasets' formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rag_windows.evaluation.record import ReadPassage, Record

TEXTS = {
    "Lighthouse:1": "The lighthouse of Orvell was built in 1811 out of grey stone.",
    "Lighthouse:2": "Its lamp burnt oil until 1902, when it was wired.",
    "Harbour:4": "The harbour freezes over in hard winters. “Ice”, they say, “keeps the boats”.",
}


def evidence(name: str) -> dict[str, Any]:
    return {
        "passage_id": name,
        "passage_text": TEXTS[name],
        "passage_titles": [name.partition(":")[0], "History"],
    }


def label(response: str, kind: str, *names: str) -> dict[str, Any]:
    return {
        "responseType": kind,
        "response": response,
        "evidence": [evidence(name) for name in names],
    }


def inscit() -> dict[str, Any]:
    """Two conversations, three turns, three passages."""
    first = ["When was the lighthouse built?"]
    second = [*first, "In 1811.", "What did its lamp burn?"]
    return {
        "coast_1": {
            "seedArticle": {"title": "Lighthouse"},
            "turns": [
                {
                    "context": first,
                    "prevEvidence": [],
                    "labels": [label("In 1811.", "directAnswer", "Lighthouse:1")],
                },
                {
                    "context": second,
                    "prevEvidence": [],
                    "labels": [
                        label("Oil, until 1902.", "directAnswer", "Lighthouse:2"),
                        label("Do you mean today?", "clarification", "Lighthouse:2", "Harbour:4"),
                    ],
                },
            ],
        },
        "coast/2": {
            "turns": [
                {
                    "context": ["Who owns the ferry?"],
                    "labels": [label("I can't tell.", "noAnswerNoRelevantInfo")],
                }
            ]
        },
    }


def chatrag(**changes: Any) -> dict[str, Any]:
    """One record."""
    return {
        "messages": [
            {"role": "user", "content": "When was the lighthouse built?"},
            {"role": "assistant", "content": "In 1811."},
            {"role": "user", "content": "And wired?"},
        ],
        "ctxs": [
            {"title": "Lighthouse", "text": TEXTS["Lighthouse:2"], "score": "81.5"},
            {"title": "Harbour", "text": TEXTS["Harbour:4"], "score": 79},
        ],
        "answers": ["In 1902.", "1902"],
        **changes,
    }


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_lines(path: Path, values: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in values), encoding="utf-8")
    return path


def record(key: str, answer: str = "In 1811.", **changes: Any) -> Record:
    passages = (
        ReadPassage("d1", "Harbour:4", mass=0.1),
        ReadPassage("d2", "Lighthouse:2", mass=0.6),
        ReadPassage("d3", "Lighthouse:1", mass=0.3),
    )
    return Record(key, "ape@20", answer, **{"passages": passages, **changes})
