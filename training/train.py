"""Trains the embedded reader: `python -m training.train --out DIR --steps N --seed S`.

Writes to DIR: `checkpoint.safetensors` (to resume from: the same command goes on where it stopped),
`model/` (weights, configuration, tokenizer), `progress.jsonl` and `curve.png`. An interrupt (SIGINT
or SIGTERM) keeps the result. `--steps` counts all runs of DIR together, so that a busy machine only
takes longer; the learning rate falls over their last half. On a CPU one process a core is fastest,
each with OMP_NUM_THREADS=1:
`torchrun --nproc-per-node 2 -m training.train --out DIR ...`.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from training import attention
from training.checkpoint import load_checkpoint, save_checkpoint
from training.curriculum import Curriculum
from training.curve import draw_curve
from training.initialise import freeze, new_reader, start_from
from training.levels import CURRICULA
from training.objective import answer_loss, optimizers
from training.parallel import Group
from training.samples import draw_sample
from training.sequences import Batch, Encoder
from training.vocabulary import save_tokenizer, train_tokenizer

log = logging.getLogger("training")


@dataclass(frozen=True)
class Settings:
    """What a run is made of; rates are those after warm-up, before the final decrease."""

    out: Path
    steps: int = 1800
    seed: int = 0
    device: str = "cpu"
    tokens: int = 4096
    width: int = 128
    layers: int = 4
    inner: int = 384
    muon_rate: float = 0.02
    adam_rate: float = 2e-3
    warm_up: int = 100
    decay_from: float = 0.5
    curriculum: str = "reader"
    weights: Path | None = None
    save_every_s: float = 120.0


class Trainer:
    """One run: model, optimizers, curriculum and the generator of its data."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.encoder = Encoder(tokenizer)
        self.group = Group.join()
        model = new_reader(
            tokenizer,
            settings.seed,
            width=settings.width,
            layers=settings.layers,
            inner=settings.inner,
        )
        if settings.weights is not None:
            start_from(model, settings.weights)
        self.model = model.to(settings.device)
        if settings.device == "cpu":
            attention.register()
            self.model.set_attn_implementation(attention.NAME)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = optimizers(self.model, settings.muon_rate, settings.adam_rate)
        self.base = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.curriculum = Curriculum(settings.curriculum)
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        self.stopped = False

    def rate(self) -> float:
        """The factor on both learning rates: warm-up, constant, then a line down to 2%."""
        settings = self.settings
        tail = (1 - self.step / settings.steps) / (1 - settings.decay_from)
        return min(1.0, (self.step + 1) / settings.warm_up, max(0.02, tail))

    def draw(self, level: int, rng: np.random.Generator) -> Batch:
        """A batch of one level with about `tokens` tokens."""
        recipe = self.curriculum.levels[level].recipe
        samples = [draw_sample(rng, recipe)]
        length = sum(len(ids) for ids, _ in self.encoder.parts(samples[0]))
        for _ in range(self.settings.tokens // length - 1):
            samples.append(draw_sample(rng, recipe))
        batch = self.encoder.batch(samples, rng, recipe.jitter)
        device = self.settings.device
        return Batch(batch.ids.to(device), batch.positions.to(device), batch.loss.to(device))

    def train_step(self) -> float:
        """One batch (in each process); returns its loss. Sets `elapsed` and `stopped` for all."""
        begun = time.monotonic()
        # Fresh generators for each step: a resumed run draws what an unbroken one would have drawn.
        level = self.curriculum.draw(np.random.default_rng([self.settings.seed, self.step]))
        seeds = [self.settings.seed, self.step, 1 + self.group.rank]
        batch = self.draw(level, np.random.default_rng(seeds))
        factor = self.rate()
        for optimizer, base in zip(self.optimizers, self.base, strict=True):
            optimizer.zero_grad()
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * factor
        with torch.autocast(self.settings.device, torch.bfloat16):
            loss, accuracy = answer_loss(self.model, batch)
        loss.backward()
        numbers = [float(loss.detach()), accuracy, float(self.stopped)]
        numbers = self.group.average(self.trained, numbers)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.curriculum.note(level, numbers[1])
        self.step += 1
        self.tokens += batch.ids.numel() * self.group.size
        seconds = self.group.average([], [time.monotonic() - begun])[0]
        self.elapsed += seconds
        self.stopped = numbers[2] > 0
        return numbers[0]

    def run(self) -> None:
        """Trains until the steps are used up or the run is stopped, then saves."""
        saved, loss = self.elapsed, None
        while not self.stopped and self.step < self.settings.steps:
            loss = self.train_step()
            if self.step % 50 == 0:
                self.report(loss)
            if self.elapsed - saved > self.settings.save_every_s:
                self.save()
                saved = self.elapsed
        if loss is not None and self.step % 50:
            self.report(loss)
        self.save()

    def report(self, loss: float) -> None:
        """One line to the log and one to progress.jsonl."""
        if self.group.rank:
            return
        accuracy = {k: round(v, 3) for k, v in sorted(self.curriculum.accuracy.items())}
        row = {
            "step": self.step,
            "minutes": round(self.elapsed / 60, 2),
            "tokens": self.tokens,
            "loss": round(loss, 4),
            "level": self.curriculum.level,
            "accuracy": accuracy,
        }
        with (self.settings.out / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = " ".join(f"{k}:{v:.2f}" for k, v in accuracy.items())
        log.info(
            "%6d %5.1f min %5.1fM tokens %5.0f/s level %d loss %.3f  %s",
            self.step,
            self.elapsed / 60,
            self.tokens / 1e6,
            self.tokens / max(1e-9, self.elapsed),
            self.curriculum.level,
            loss,
            shown,
        )

    def save(self) -> None:
        """Writes checkpoint, model folder and curve; each file is replaced, never half-written."""
        if self.group.rank:
            return
        out = self.settings.out
        facts = {
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "curriculum": self.curriculum.state(),
        }
        save_checkpoint(out, self.model, self.optimizers, facts)
        self.model.save_pretrained(out / "model")
        save_tokenizer(self.tokenizer, out / "model")
        draw_curve(out / "progress.jsonl", out / "curve.png", self.curriculum.levels)

    def resume(self) -> bool:
        """Goes on from the checkpoint in `out`, if there is one."""
        settings = self.settings
        facts = load_checkpoint(settings.out, self.model, self.optimizers, settings.device)
        if facts is None:
            return False
        freeze(self.model)
        self.step, self.tokens = int(facts["step"]), int(facts["tokens"])
        self.elapsed = float(facts["elapsed"])
        self.curriculum = Curriculum.from_state(facts["curriculum"])
        return True


def train(settings: Settings) -> Trainer:
    """Trains (or goes on training) a reader in `settings.out` and returns the finished trainer."""
    settings.out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    trainer = Trainer(settings, train_tokenizer())
    if trainer.resume():
        log.info("going on from step %d, %.1f min", trainer.step, trainer.elapsed / 60)

    def stop(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        trainer.stopped = True

    previous = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        trainer.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
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
    parser.add_argument("--layers", type=int, default=Settings.layers)
    parser.add_argument("--width", type=int, default=Settings.width)
    parser.add_argument("--inner", type=int, default=Settings.inner)
    parser.add_argument("--muon-rate", type=float, default=Settings.muon_rate)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
