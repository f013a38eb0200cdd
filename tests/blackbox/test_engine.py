"""What wrapping, storing and guarding leave as it was, or do only when asked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from rag_windows import Passage, PassageCache, WindowedLM
from tests.blackbox.conftest import QUESTION
from tests.rag_windows import small

TEXTS = ["One two three.", "Four five six."]


def test_wrapping_leaves_every_training_flag_as_it_was() -> None:
    model = copy.deepcopy(small.model()).train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())
    assert {name: module.training for name, module in model.named_modules()} == before


@pytest.mark.parametrize("store", ["as computed", "int8"])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_windows_of_a_float64_model_are_stored(tmp_path: Path, store: str, tier: str) -> None:
    sizes: dict[str, Any] = {"memory": "16MiB"}
    if tier == "disk":
        sizes = {"memory": None, "disk": "16MiB", "path": tmp_path / "windows"}
    model = copy.deepcopy(small.model()).double()
    lm = WindowedLM(model, small.tokenizer(), cache=PassageCache(store=store, **sizes))
    cold = lm.generate("Who?", TEXTS, max_new_tokens=4)
    warm = lm.generate("Who?", TEXTS, max_new_tokens=4)
    assert (cold.usage.cached_windows, warm.usage.cached_windows) == (0, 2)
    assert warm.token_ids == cold.token_ids
    plain = WindowedLM(model, small.tokenizer())
    scores = [one.score("Who?", TEXTS, ["a", "b"]) for one in (lm, plain)]
    for stored, exact in zip(*scores, strict=True):
        assert stored.logprob == pytest.approx(exact.logprob, rel=0.05)


def test_two_windows_that_disagree_are_read_as_they_are(reader: WindowedLM) -> None:
    towns = ["Birholm", "Sulava", "Esia", "Birholm", "Sulava", "Esia"]
    asked = [
        Passage(f"Vara Zelmont was born in {town}.", title=f"{i}") for i, town in enumerate(towns)
    ]
    assert reader.generate(QUESTION, asked, fallback="sequential").fallback is None
