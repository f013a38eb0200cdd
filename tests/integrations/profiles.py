"""A calibration profile of the small model, as it is loaded from a folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rag_windows import APE, Profile, WindowedLM
from tests.rag_windows import small

PROFILED = APE(0.9, 0.6)
"""The method that it brings; not the default."""

GUARD: Any = {
    "measure": "1 - sum of squared shares",
    "threshold": 0.5,
    "false_alarms": 0.125,
    "missed": 0.25,
    "single_hop": 8,
    "multi_hop": 4,
}


def saved(folder: Path) -> Path:
    """The folder, with the small model and its tokenizer in it."""
    small.model().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    return folder


def profile_of(folder: Path) -> Profile:
    """A profile of the model in a folder, without a guard's threshold."""
    words = "tower river bridge lamp stone field door lake".split()
    examples = [{"query": f"{word}?", "passages": [f"a {word}", "a stone"]} for word in words]
    lm = WindowedLM.from_pretrained(folder)
    found = lm.calibrate(examples, settings=[PROFILED], max_new_tokens=2, refine=False)
    return dataclasses.replace(found, method=PROFILED, best=PROFILED, beats_default=True)


def guarded(profile: Profile) -> Profile:
    """It, with a guard's threshold."""
    return dataclasses.replace(profile, guard=GUARD)
