import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rag_windows import WindowedLM
from training.export import export
from training.model import frozen_parameters
from training.train import Settings, Trainer, average, train


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
    rows = (settings.out / "progress.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[-1])["step"] == 20


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


def test_export_loads_everywhere(run: tuple[Settings, Trainer], tmp_path: Path) -> None:
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
    assert lm.generate("Who?", ["Alra."], max_new_tokens=2, do_sample=False).token_ids


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
    assert frozen.grad is None
