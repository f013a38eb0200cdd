"""The reader before training, its training, and the folder that is shipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rag_windows import WindowedLM
from training.tokens import spaced_pairs, train_tokenizer
from training.train import Settings, Trainer, export, frozen_parameters, new_reader, train

TOKENIZER = train_tokenizer()


def test_the_same_seed_gives_the_same_reader_with_frozen_heads_and_near_twins() -> None:
    first, second = new_reader(TOKENIZER, 4), new_reader(TOKENIZER, 4)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    frozen = {id(p) for p in frozen_parameters(first)}
    assert all(p.requires_grad == (id(p) not in frozen) for p in first.parameters())
    table = first.model.embed_tokens.weight.detach()
    twins = torch.tensor(spaced_pairs(TOKENIZER)[:500])
    difference = table[twins[:, 1]] - table[twins[:, 0]]
    near = (difference - difference.mean(0)).norm(dim=1).mean()
    far = (table[twins[:, 0]] - table[twins[:, 0].roll(1)]).norm(dim=1).mean()
    assert near < far / 3


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    out = tmp_path_factory.mktemp("run") / "reader"
    return train(Settings(out, steps=20, tokens=512))


def test_twenty_steps_lower_the_loss_and_keep_the_positional_heads(trainer: Trainer) -> None:
    fresh = Trainer(trainer.settings, TOKENIZER)
    start = [parameter.clone() for parameter in frozen_parameters(fresh.model)]
    before = [fresh.train_step() for _ in range(3)]
    assert max(trainer.train_step() for _ in range(3)) < min(before) - 0.1
    for kept, first in zip(frozen_parameters(trainer.model), start, strict=True):
        assert torch.equal(kept, first)


def test_a_run_may_end_by_the_clock_and_draw_ahead(tmp_path: Path) -> None:
    settings = Settings(tmp_path, tokens=512, minutes=0.01, workers=1, curriculum="connector")
    ended = train(replace(settings, layers=3))
    assert 0 < ended.step < settings.steps
    assert ended.seconds > 0.6
    assert (tmp_path / "model.safetensors").exists()


def test_a_killed_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.train.SAVE_EVERY", 2)
    whole = train(Settings(tmp_path / "whole", steps=5, tokens=512))
    killed = Settings(tmp_path / "killed", steps=5, tokens=512)
    begun = Trainer(killed, TOKENIZER)
    killed.out.mkdir()
    for _ in range(2):
        begun.train_step()
    begun.save()
    begun.train_step()  # lost with the process
    again = train(killed)
    assert again.step == whole.step
    assert again.curriculum.accuracy == whole.curriculum.accuracy
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not [path for path in killed.out.iterdir() if "checkpoint" in path.name]


def test_what_is_exported_answers_and_is_trained_further(trainer: Trainer) -> None:
    settings = trainer.settings
    lm = WindowedLM.from_pretrained(settings.out)
    assert lm.model.dtype == torch.float32
    assert lm.generate("Who?", ["Alra."], max_new_tokens=2, do_sample=False).token_ids
    assert lm.tokenizer.eos_token == "<|end|>"
    later = replace(settings, weights=settings.out, curriculum="learner", seed=1)
    going_on, fresh = Trainer(later, TOKENIZER), Trainer(settings, TOKENIZER).model
    for mine, its in zip(going_on.model.parameters(), lm.model.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-3, atol=1e-3)  # fp16
    kept = zip(frozen_parameters(going_on.model), frozen_parameters(fresh), strict=True)
    assert all(torch.equal(mine, first) for mine, first in kept)
    assert going_on.train_step() > 0
    deep = Trainer(replace(later, curriculum="connector", layers=6), TOKENIZER)
    ids = torch.tensor([TOKENIZER("Alra was founded in 1900.")["input_ids"]])
    with torch.no_grad():
        expected, got = lm.model(ids).logits, deep.model(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # more layers, the same answers
    before = deep.model.model.layers[5].mlp.down_proj.weight.clone()
    assert deep.train_step() > 0
    assert not torch.equal(deep.model.model.layers[5].mlp.down_proj.weight, before)
    export(deep.model, TOKENIZER, settings.out)
    with pytest.raises(ValueError, match="more layers"):
        Trainer(later, TOKENIZER)
    with torch.no_grad():
        going_on.model.model.embed_tokens.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="out of its range"):
        export(going_on.model, TOKENIZER, settings.out)
