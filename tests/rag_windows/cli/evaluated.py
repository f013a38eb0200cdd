"""What a run of `rag-windows eval` left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]
QUICK = ("--top-k", "2", "--max-new-tokens", "3", "--speed", "0")


def records(folder: Path) -> Lines:
    text = (folder / "records.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def one_line(stderr: str) -> str:
    (line,) = stderr.splitlines()
    assert line.startswith("Error: ")
    return line
