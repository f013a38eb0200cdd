import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rag_windows import WindowedLM
from training.evaluate import evaluate, markdown
from training.export import export
from training.initialise import frozen_parameters
from training.train import Settings, Trainer, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Trainer]:
    settings = Settings(
        tmp_path_factory.mktemp("run"), steps=20, tokens=512, width=64, layers=2, inner=64
    )
    return settings, train(settings)


def test_twenty_steps_lower_the_loss_and_keep_the_positional_heads(
    run: tuple[Settings, Trainer],
) -> None:
    settings, trainer = run
    assert trainer.step == 20
    fresh = Trainer(settings, trainer.tokenizer)
    before = [fresh.train_step() for _ in range(3)]
    after = [trainer.train_step() for _ in range(3)]
    assert max(after) < min(before) - 0.1
    start = Trainer(settings, trainer.tokenizer).model
    for kept, first in zip(frozen_parameters(trainer.model), frozen_parameters(start), strict=True):
        assert torch.equal(kept, first)
    assert (settings.out / "curve.png").stat().st_size > 0


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = Settings(tmp_path / "a", steps=6, tokens=256, width=64, layers=2, inner=64)
    whole = train(small)
    halves = replace(small, out=tmp_path / "b")
    first = Trainer(halves, whole.tokenizer)
    halves.out.mkdir()
    for _ in range(3):
        first.train_step()
    first.save()
    resumed = train(halves)
    assert resumed.step == 6
    assert resumed.curriculum == whole.curriculum
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_run_goes_on_from_another_models_weights_but_keeps_its_positional_heads(
    run: tuple[Settings, Trainer], tmp_path: Path
) -> None:
    settings, trainer = run
    trainer.save()
    export(settings.out / "model", tmp_path / "reader")
    fresh = Trainer(settings, trainer.tokenizer).model
    later = replace(settings, weights=tmp_path / "reader", curriculum="learner", seed=1)
    going_on = Trainer(later, trainer.tokenizer)
    for mine, its in zip(going_on.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=1e-3)
    for kept, first in zip(
        frozen_parameters(going_on.model), frozen_parameters(fresh), strict=True
    ):
        assert torch.equal(kept, first)
    assert going_on.curriculum.name == "learner"
    assert going_on.train_step() > 0


def test_export_loads_everywhere_and_is_evaluated(
    run: tuple[Settings, Trainer], tmp_path: Path
) -> None:
    settings, trainer = run
    trainer.save()
    size = export(settings.out / "model", tmp_path / "reader")
    assert size == (tmp_path / "reader" / "model.safetensors").stat().st_size
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".export")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "reader", dtype="auto")
    assert model.dtype == torch.float32
    table = model.model.embed_tokens.weight
    assert torch.allclose(table, trainer.model.model.embed_tokens.weight, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "reader").eos_token == "<|end|>"

    lm = WindowedLM.from_pretrained(tmp_path / "reader")
    arguments = (["single", "follow-up"], [1, 3], ["sequential", "ape:0.9:0.9"], 3, 0)
    cells = evaluate(lm, *arguments)
    assert [(c.task, c.passages, c.method, c.right) for c in cells] == [
        (c.task, c.passages, c.method, c.right) for c in evaluate(lm, *arguments)
    ]
    assert len(cells) == 8
    assert all(c.low <= c.accuracy <= c.high and c.total == 3 for c in cells)
    assert json.dumps(cells[0].task) == '"single"'
    assert "| single | *entity-blind baseline* | 100 |" in markdown(cells)
