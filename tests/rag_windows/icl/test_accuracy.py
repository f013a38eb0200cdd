"""The embedded learner labels by demonstrations in windows, and classify says what it would say."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from rag_windows import LimitError, WindowedLM
from training.samples import Demonstrations, draw_demonstrations

USUAL = Demonstrations(8, labels=(2, 6), keywords=(1, 3))
Task = tuple[list[tuple[str, str]], list[str], list[str]]
"""Demonstrations, texts and right labels, of pairs of words and labels not trained on."""


@functools.cache
def learner() -> WindowedLM:
    return WindowedLM.from_pretrained("tiny-learner")


def draw(seed: int, recipe: Demonstrations = USUAL) -> Task:
    sample = draw_demonstrations(np.random.default_rng(seed), recipe, "held-out")
    lines = [line.rpartition(": ") for _, text in sample.passages for line in text.split("\n")]
    texts = [turn.question.removesuffix(":") for turn in sample.turns]
    return (
        [(text, label) for text, _, label in lines],
        texts,
        [turn.answer for turn in sample.turns],
    )


def rights(task: Task, method: str, windows: int) -> list[bool]:
    shown, texts, answers = task
    found = learner().classify(texts, shown, method=method, windows=windows)
    return [one.label == answer for one, answer in zip(found, answers, strict=True)]


@pytest.mark.parametrize("method", ["sequential", "pcw", "ape"])
def test_labels_are_right(method: str) -> None:
    """By four labelling rules; each with 64 demonstrations and 12 questions."""
    found = [right for seed in range(4) for right in rights(draw(7000 + seed), method, 8)]
    assert np.mean(found) >= 0.95


def test_labels_are_right_beyond_the_context() -> None:
    """Of 1,920 demonstrations, about 30 show the word in question."""
    task = draw(7100, Demonstrations(240, labels=(16, 16), keywords=(4, 4), questions=32))
    with pytest.raises(LimitError, match="one after the other"):
        rights(task, "sequential", 32)
    assert np.mean(rights(task, "ape", 32)) >= 0.9


def test_the_label_is_what_the_model_would_say() -> None:
    shown, texts, _ = draw(7000)
    quarter = len(shown) // 4
    passages = [
        "\n".join(f"{text}: {label}" for text, label in shown[i : i + quarter])
        for i in range(0, len(shown), quarter)
    ]
    for one in learner().classify(texts[:4], shown, method="ape", windows=4):
        said = learner().generate(f"{one.text}:", passages, method="ape", max_new_tokens=8)
        assert said.text == one.label
