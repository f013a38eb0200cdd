"""Where the shipped samples lie."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path


def samples_path() -> Path:
    """Folder of the shipped samples."""
    return Path(str(resources.files("rag_windows") / "samples"))


def sample_questions() -> list[str]:
    """Questions that documents of the shipped corpus answer."""
    lines = (samples_path() / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["question"] for line in lines]
