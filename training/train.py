"""Trains the embedded reader: `python -m training.train --out DIR --steps N --seed S`.

Writes to DIR: `checkpoint.safetensors` (to resume from: the same command goes on where the last
checkpoint was written, every two minutes), `model/` (weights, configuration, tokenizer) and
`progress.jsonl`. `--steps` counts all runs of DIR together, so that a busy machine only takes
longer; the learning rate falls over their last half. On a CPU one process a core is fastest, each
with OMP_NUM_THREADS=1: `torchrun --nproc-per-node 2 -m training.train --out DIR ...`. Each process
draws its own batch; gradients and the few numbers that steer the run are averaged.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from training.curriculum import CURRICULA, Curriculum
from training.model import BLOCK_ATTENTION, new_reader, start_from
from training.samples import draw_sample
from training.tokens import ANSWER, Batch, Encoder, train_tokenizer

log = logging.getLogger("training")

WEIGHTS = (0.0, 1.0, 0.7, 0.3)
"""Loss weight of each mark of `Batch.loss`: none, answer, rest of the answer, name."""
WARM_UP, DECAY_FROM = 100, 0.5
"""Steps of warm-up, and the share of all steps behind which the learning rate falls."""
MUON_RATE, ADAM_RATE = 0.02, 2e-3
"""Learning rates after warm-up, before the final decrease."""
SAVE_EVERY_S = 120.0
CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    out: Path
    steps: int = 1800
    seed: int = 0
    device: str = "cpu"
    tokens: int = 4096
    width: int = 128
    layers: int = 4
    inner: int = 384
    curriculum: str = "reader"
    weights: Path | None = None


def answer_loss(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
    """(weighted mean loss over marked tokens, share of answers whose first token is right)."""
    # An explicit mask: without one, transformers would take gaps in the positions for the borders
    # of packed sequences.
    hidden = model.model(
        input_ids=batch.ids,
        attention_mask=torch.ones_like(batch.ids),
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    marks = batch.loss[:, 1:]
    chosen = marks > 0
    logits = model.lm_head(hidden[:, :-1][chosen]).float()
    target = batch.ids[:, 1:][chosen]
    first = marks[chosen] == ANSWER
    weights = logits.new_tensor(WEIGHTS)[marks[chosen]]
    right = (logits.detach().argmax(-1) == target)[first].float().mean()
    losses = F.cross_entropy(logits, target, reduction="none")
    return (losses * weights).sum() / weights.sum(), float(right)


def average(parameters: Sequence[torch.nn.Parameter], numbers: Sequence[float]) -> list[float]:
    """Averages the gradients of parameters in place, and numbers, over all processes."""
    if not dist.is_initialized():
        return list(numbers)
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = parameters[0].device if parameters else None
    extra = torch.tensor(list(numbers), device=device)
    flat = torch.cat([*(g.reshape(-1) for g in gradients), extra])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    *parts, means = flat.split([*(g.numel() for g in gradients), len(extra)])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return [float(x) for x in means]


class Trainer:
    """One run: model, optimizers, curriculum and the generator of its data."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.encoder = Encoder(tokenizer)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        sizes = {"width": settings.width, "layers": settings.layers, "inner": settings.inner}
        model = new_reader(tokenizer, settings.seed, **sizes)
        if settings.weights is not None:
            start_from(model, settings.weights)
        self.model = model.to(settings.device)
        if settings.device == "cpu":
            self.model.set_attn_implementation(BLOCK_ATTENTION)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        # Muon for the matrices, AdamW for embeddings, biases and norms.
        table = self.model.get_input_embeddings().weight
        matrices = [p for p in self.trained if p.ndim == 2 and p is not table]
        rest = [p for p in self.trained if p.ndim != 2 or p is table]
        muon = torch.optim.Muon(
            matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
        )
        adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizers: dict[torch.optim.Optimizer, float] = {muon: MUON_RATE, adam: ADAM_RATE}
        self.curriculum = Curriculum(settings.curriculum)
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        self.clock = time.monotonic()

    def draw(self, level: int, rng: np.random.Generator) -> Batch:
        """A batch of one level with about `tokens` tokens."""
        recipe = self.curriculum.levels[level].recipe
        first = draw_sample(rng, recipe)
        count = self.settings.tokens // sum(len(ids) for ids, _ in self.encoder.parts(first))
        samples = [first, *(draw_sample(rng, recipe) for _ in range(count - 1))]
        batch = self.encoder.batch(samples, rng, recipe.jitter)
        device = self.settings.device
        return Batch(batch.ids.to(device), batch.positions.to(device), batch.loss.to(device))

    def train_step(self) -> float:
        """One batch (in each process); returns its loss."""
        settings = self.settings
        # Fresh generators for each step: a resumed run draws what an unbroken one would have drawn.
        level = self.curriculum.draw(np.random.default_rng([settings.seed, self.step]))
        seeds = [settings.seed, self.step, 1 + self.rank]
        batch = self.draw(level, np.random.default_rng(seeds))
        # Warm-up, constant, then a line down to 2%.
        tail = (1 - self.step / settings.steps) / (1 - DECAY_FROM)
        factor = min(1.0, (self.step + 1) / WARM_UP, max(0.02, tail))
        for optimizer, rate in self.optimizers.items():
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        with torch.autocast(settings.device, torch.bfloat16):
            loss, accuracy = answer_loss(self.model, batch)
        loss.backward()
        before, self.clock = self.clock, time.monotonic()
        numbers = [float(loss.detach()), accuracy, self.clock - before]
        numbers = average(self.trained, numbers)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.curriculum.note(level, numbers[1])
        self.step += 1
        size = dist.get_world_size() if dist.is_initialized() else 1
        self.tokens += batch.ids.numel() * size
        self.elapsed += numbers[2]
        return numbers[0]

    def run(self) -> None:
        """Trains until the steps are used up, and saves."""
        saved = self.elapsed
        while self.step < self.settings.steps:
            loss = self.train_step()
            last = self.step == self.settings.steps
            if last or self.step % 50 == 0:
                self.report(loss)
            if last or self.elapsed - saved > SAVE_EVERY_S:
                self.save()
                saved = self.elapsed

    def report(self, loss: float) -> None:
        """One line to the log and to progress.jsonl."""
        if self.rank:
            return
        row = {
            "step": self.step,
            "minutes": round(self.elapsed / 60, 2),
            "tokens": self.tokens,
            "loss": round(loss, 4),
            "level": self.curriculum.level,
            "accuracy": {k: round(v, 3) for k, v in sorted(self.curriculum.accuracy.items())},
        }
        with (self.settings.out / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        log.info("%s", json.dumps(row))

    def save(self) -> None:
        """Writes checkpoint and model folder; the old checkpoint stays until then."""
        if self.rank:
            return
        out = self.settings.out
        tensors = {f"model.{n}": p.detach().contiguous() for n, p in self.model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                for name, tensor in values.items():
                    tensors[f"{number}.{index}.{name}"] = tensor.contiguous()
        facts = {
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "curriculum": asdict(self.curriculum),
        }
        fresh = out / f"{CHECKPOINT}.new"
        save_file(tensors, fresh, metadata={"facts": json.dumps(facts)})
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(out / CHECKPOINT)
        self.model.save_pretrained(out / "model")
        self.tokenizer.save_pretrained(out / "model")

    def resume(self) -> bool:
        """Goes on from the checkpoint in `out`, if there is one."""
        path = self.settings.out / CHECKPOINT
        if not path.exists():
            return False
        tensors = load_file(path, device=self.settings.device)
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors.pop(f"model.{name}"))
        states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in self.optimizers]
        for key, tensor in tensors.items():
            number, index, name = key.split(".", 2)
            states[int(number)].setdefault(int(index), {})[name] = tensor
        for optimizer, state in zip(self.optimizers, states, strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.step, self.tokens, self.elapsed = facts["step"], facts["tokens"], facts["elapsed"]
        self.curriculum = TypeAdapter(Curriculum).validate_python(facts["curriculum"])
        return True


def train(settings: Settings) -> Trainer:
    """Trains (or goes on training) a reader in `settings.out` and returns the finished trainer."""
    settings.out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    trainer = Trainer(settings, train_tokenizer())
    if trainer.resume():
        log.info("going on from step %d, %.1f min", trainer.step, trainer.elapsed / 60)

    trainer.run()
    return trainer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curriculum", choices=list(CURRICULA), default=Settings.curriculum)
    parser.add_argument("--weights", type=Path, help="folder of a model to go on from")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=Settings.tokens, help="per step")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
