"""The reader before training, its training, and the folder that is shipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


def test_what_is_exported_answers_and_is_trained_further(trainer: Trainer, tmp_path: Path) -> None:
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
    small = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_attention_heads=2, vocab_size=99))
    small.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="other shapes"):
        Trainer(replace(later, weights=tmp_path), TOKENIZER)
    with torch.no_grad():
        going_on.model.model.embed_tokens.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="out of its range"):
        export(going_on.model, TOKENIZER, settings.out)
