"""The reader before training, its training, and the folder that is shipped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rag_windows import WindowedLM
from training.export import export
from training.model import BLOCK_ATTENTION, frozen_parameters, new_reader
from training.tokens import space_twins, train_tokenizer
from training.train import Settings, Trainer, average, train

TOKENIZER = train_tokenizer()


def test_the_same_seed_gives_the_same_reader_with_frozen_heads_and_near_twins() -> None:
    first, second = new_reader(TOKENIZER, 4), new_reader(TOKENIZER, 4)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    frozen = {id(p) for p in frozen_parameters(first)}
    assert all(p.requires_grad == (id(p) not in frozen) for p in first.parameters())
    table = first.model.embed_tokens.weight.detach()
    twins = torch.tensor(space_twins(TOKENIZER)[:500])
    difference = table[twins[:, 1]] - table[twins[:, 0]]
    near = (difference - difference.mean(0)).norm(dim=1).mean()
    far = (table[twins[:, 0]] - table[twins[:, 0].roll(1)]).norm(dim=1).mean()
    assert near < far / 3


@pytest.mark.parametrize("length", [5, 128, 300])
def test_block_attention_equals_the_model_s_own(length: int) -> None:
    model = new_reader(TOKENIZER, 0)
    ids = torch.randint(10, 4000, (2, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).expand(2, -1).clone()
    positions[:, length // 2 :] += 100
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions,
    }
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs).logits
        model.set_attn_implementation(BLOCK_ATTENTION)
        found = model(**inputs).logits
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Trainer]:
    out = tmp_path_factory.mktemp("run")
    settings = Settings(out, steps=20, tokens=512, width=64, layers=2, inner=64)
    return settings, train(settings)


def test_twenty_steps_lower_the_loss_and_keep_the_positional_heads(
    run: tuple[Settings, Trainer],
) -> None:
    settings, trainer = run
    assert trainer.step == 20
    rows = (settings.out / "progress.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[-1])["step"] == 20
    fresh = Trainer(settings, TOKENIZER)
    before = [fresh.train_step() for _ in range(3)]
    assert max(trainer.train_step() for _ in range(3)) < min(before) - 0.1
    start = Trainer(settings, TOKENIZER).model
    for kept, first in zip(frozen_parameters(trainer.model), frozen_parameters(start), strict=True):
        assert torch.equal(kept, first)


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = Settings(tmp_path / "a", steps=6, tokens=256, width=64, layers=2, inner=64)
    whole = train(small)
    first = Trainer(replace(small, out=tmp_path / "b"), TOKENIZER)
    first.settings.out.mkdir()
    for _ in range(3):
        first.train_step()
    first.save()
    resumed = train(first.settings)
    assert (resumed.step, resumed.curriculum) == (6, whole.curriculum)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_what_is_exported_answers_and_is_trained_further(
    run: tuple[Settings, Trainer], tmp_path: Path
) -> None:
    settings, trainer = run
    trainer.save()
    size = export(settings.out / "model", tmp_path / "reader")
    assert 0 <= (tmp_path / "reader" / "model.safetensors").stat().st_size - size < 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["reader"]
    lm = WindowedLM.from_pretrained(tmp_path / "reader")
    assert lm.model.dtype == torch.float32
    assert lm.generate("Who?", ["Alra."], max_new_tokens=2, do_sample=False).token_ids
    assert lm.tokenizer.eos_token == "<|end|>"
    later = replace(settings, weights=tmp_path / "reader", curriculum="learner", seed=1)
    going_on, fresh = Trainer(later, TOKENIZER), Trainer(settings, TOKENIZER).model
    for mine, its in zip(going_on.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=1e-3)
    kept = zip(frozen_parameters(going_on.model), frozen_parameters(fresh), strict=True)
    assert all(torch.equal(mine, first) for mine, first in kept)
    assert going_on.train_step() > 0


def test_gradients_and_numbers_are_averaged_in_place(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    frozen = nn.Parameter(torch.zeros(5))
    for n, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 2.0 + 2 * n)
    assert average(parameters, [3.0]) == [3.0]  # alone nothing changes
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        # One process stands for a group of two: the sum is its own part, the mean half of that.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_world_size", lambda: 2)
            numbers = average([parameters[0], frozen, parameters[1]], [8.0, 0.0])
    finally:
        dist.destroy_process_group()
    assert numbers == [4.0, 0.0]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert [grad.unique().tolist() for grad in grads] == [[1.0], [2.0]]
