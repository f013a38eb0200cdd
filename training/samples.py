"""Contexts with conversations, as text, from a recipe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from training.contexts import draw_context
from training.demonstrations import draw_demonstrations
from training.frames import draw_frame
from training.recipes import Demonstrations, Recipe, Sample
from training.turns import draw_turns
from training.vocabulary import SYSTEM_PROMPTS
from training.world import Split


def draw_sample(
    rng: np.random.Generator, recipe: Recipe | Demonstrations, split: Split = "train"
) -> Sample:
    """Draws one context with its conversation."""
    if isinstance(recipe, Demonstrations):
        return draw_demonstrations(rng, recipe, split)
    context = draw_context(rng, recipe, split)
    passages = context.passages(rng, recipe)
    system = None
    if rng.random() < recipe.system:
        system = SYSTEM_PROMPTS[int(rng.integers(len(SYSTEM_PROMPTS)))]
    turns = draw_turns(rng, recipe, context, split)
    if rng.random() >= recipe.framed:
        return Sample(passages, turns, system)
    frame = draw_frame(rng)
    framed = [
        replace(turn, question=frame.around(turn.question)) if rng.random() < 0.5 else turn
        for turn in turns
    ]
    return Sample(passages, tuple(framed), system, frame.before)
