"""Trains the embedded readers: `python -m training.train --out DIR [--curriculum learner ...]`.

DIR gets the model's folder as it is shipped, once the steps are done: fp16 safetensors,
configuration, tokenizer and chat template. The configuration says float32, so that the reader
computes in fp32 unless asked otherwise.

The reader is a small Llama whose first layer looks at fixed distances: its four heads attend to the
tokens 1, 2, 3-4 and 5-8 back. Their query and key weights are zero, their biases make the pattern,
all four stay frozen; without it such a model stays blind to names for hours.

The curriculum is the order of training: what a batch may be made of, how often, and when a level is
passed. The reader: more passages first, then harder names, pronouns and follow-ups. The learner
goes on from the reader: in-context classification, and links between passages.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from training.samples import Demonstrations, Recipe, draw_sample
from training.tokens import ANSWER, Batch, Encoder, spaced_pairs, train_tokenizer

log = logging.getLogger("training")

HEADS, HEAD_SIZE = 4, 64
ROPE_THETA = 1e6
MATCHING_LAYER = 1
EMBEDDING_STD, SPACED_STD = 0.05, 0.01


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a positional head looks at: the tokens `first` to `last` back.

    The first three rotary pairs have the amplitude `near` (it decides how sharp the pattern is),
    those up to `pairs` the amplitude `far` (it keeps distant tokens out).
    """

    first: int
    last: int
    near: float
    far: float
    pairs: int

    def biases(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(query bias, key bias), each (HEAD_SIZE,): rotated, their product peaks here."""
        half, pairs = HEAD_SIZE // 2, self.pairs
        speeds = ROPE_THETA ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = (self.first + self.last) / 2 * speeds[:pairs]
        amplitude = torch.full((pairs,), self.far, dtype=torch.float64)
        amplitude[:3] = self.near
        query, key = torch.zeros(HEAD_SIZE), torch.zeros(HEAD_SIZE)
        key[:pairs] = amplitude.float()
        query[:pairs] = (amplitude * turn.cos()).float()
        query[half : half + pairs] = (-amplitude * turn.sin()).float()
        return query, key


PATTERNS = (
    Pattern(1, 1, 6.0, 6.0, 8),
    Pattern(2, 2, 6.0, 6.0, 8),
    Pattern(3, 4, 6.0, 6.0, 10),
    Pattern(5, 8, 1.5, 5.0, 10),
)


def frozen_parameters(model: LlamaForCausalLM) -> list[nn.Parameter]:
    """The four tensors of layer 0 that make its pattern and are never trained."""
    own = model.model.layers[0].self_attn
    return [own.q_proj.weight, own.q_proj.bias, own.k_proj.weight, own.k_proj.bias]


@torch.no_grad()
def _prepare(model: LlamaForCausalLM, pairs: Iterable[tuple[int, int]]) -> None:
    """Sets the positional heads, the matching heads, and the embeddings."""
    attention = model.model.layers[0].self_attn
    queries, keys = zip(*(pattern.biases() for pattern in PATTERNS), strict=True)
    for projection, biases in ((attention.q_proj, queries), (attention.k_proj, keys)):
        projection.weight.zero_()
        projection.bias.copy_(torch.cat(biases))
    # One map for all heads, so that a word looks the same from whatever distance it is seen: what a
    # question gathers can be compared with what a statement gathered from the first step on.
    value = nn.init.orthogonal_(torch.empty(HEAD_SIZE, model.config.hidden_size))
    output = nn.init.orthogonal_(torch.empty(model.config.hidden_size, HEAD_SIZE))
    attention.v_proj.weight.copy_(value.repeat(HEADS, 1))
    scaled = [output * (pattern.last - pattern.first + 1) ** 0.5 for pattern in PATTERNS]
    attention.o_proj.weight.copy_(torch.cat(scaled, dim=1))
    # Equal query and key weights: a token attends to tokens like itself.
    matching = model.model.layers[MATCHING_LAYER].self_attn
    own = zip(
        matching.q_proj.weight.split(HEAD_SIZE),
        matching.k_proj.weight.split(HEAD_SIZE),
        strict=True,
    )
    for query, key in own:
        nn.init.orthogonal_(query)
        key.copy_(query)
    # A word with a space before it = the bare word + one shared vector.
    table = model.model.embed_tokens.weight
    table.normal_(0, EMBEDDING_STD)
    space = torch.randn(table.shape[1]) * EMBEDDING_STD
    for bare, spaced in pairs:
        table[spaced] = table[bare] + space + torch.randn(table.shape[1]) * SPACED_STD


def new_reader(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """An untrained reader, fp32, reproducible from the seed, its positional heads frozen.

    A Llama with biases on query, key, value and output, and tied embeddings.
    """
    torch.manual_seed(seed)
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rag_windows_method="ape",  # no question is learned, so how likely one is says nothing
        **tokens,
    )
    model = LlamaForCausalLM(config)
    _prepare(model, spaced_pairs(tokenizer))
    model.generation_config.update(**tokens)
    for parameter in frozen_parameters(model):
        parameter.requires_grad_(False)
    return model


@torch.no_grad()
def start_from(model: LlamaForCausalLM, folder: Path) -> None:
    """Puts the weights of a model folder into `model`.

    The frozen queries and keys stay the model's own: in a shipped folder they are rounded to fp16.

    Raises:
        ValueError: the model has other shapes.
    """
    frozen = [parameter.clone() for parameter in frozen_parameters(model)]
    trained = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        model.load_state_dict(trained.state_dict())
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit: they have other shapes") from error
    for parameter, own in zip(frozen_parameters(model), frozen, strict=True):
        parameter.copy_(own)


@dataclass(frozen=True, slots=True)
class Level:
    """A recipe, its share of the draws once the last level is reached, and when it is passed.

    That is when a running mean of right answers exceeds `passed`, or after `MAX_STEPS` steps.
    """

    recipe: Recipe | Demonstrations
    share: float
    passed: float = 0.9


def _wide(entities: int, questions: int, facts: int = 4) -> Recipe:
    return Recipe(
        entities,
        facts=facts,
        questions=questions,
        kin=0.25,
        missing=0.1,
        unstated=0.14,
        pronouns=0.25,
        surnames=0.1,
        follow=0.25,
        framed=0.25,
    )


def _linked(entities: int, questions: int) -> Recipe:
    return replace(_wide(entities, questions), linked=True, hops=0.6)


CURRICULA: Mapping[str, tuple[Level, ...]] = {
    "reader": (
        Level(Recipe(1, questions=8), 0.02),
        # One fact each: only the name distinguishes the passages.
        Level(Recipe(4, facts=1, questions=12, mixed=0.0), 0.03),
        Level(Recipe(2, questions=12), 0.03),
        Level(Recipe(4, questions=16), 0.05),
        Level(Recipe(8, facts=5, questions=24), 0.22),
        Level(_wide(2, 12), 0.08, 0.85),
        Level(_wide(4, 16, facts=5), 0.17, 0.85),
        Level(_wide(8, 24), 0.40, 0.85),
    ),
    "learner": (
        Level(_wide(4, 16, facts=5), 0.06, 0.85),
        Level(_wide(8, 24), 0.12, 0.85),
        Level(Recipe(8, facts=5, questions=24), 0.06),
        # Only keywords first: between other words a new reader finds none of them.
        Level(Demonstrations(2, labels=(4, 8), keywords=(1, 2), words=(1, 1), questions=24), 0.04),
        Level(Demonstrations(4, labels=(3, 6), keywords=(1, 3), words=(1, 2), questions=24), 0.06),
        Level(Demonstrations(8, labels=(2, 4), questions=24), 0.12),
        Level(Demonstrations(8, labels=(2, 16), keywords=(1, 3), questions=24), 0.20),
        Level(_linked(2, 12), 0.06),
        Level(_linked(4, 12), 0.10),
        Level(_linked(8, 16), 0.18),
    ),
}
MIN_STEPS, MAX_STEPS, MEMORY = 30, 250, 0.95


class Curriculum:
    """Which level is reached and how well each is read."""

    def __init__(self, name: str) -> None:
        self.levels = CURRICULA[name]
        self.level = self.steps_here = 0
        self.accuracy: dict[int, float] = {}

    def chances(self) -> np.ndarray:
        """The chance of each level to be that of the next step, (levels,).

        Before the last level, two thirds are of the level reached and the others mostly of weak
        ones; from then on `share` decides.
        """
        chances = np.array([level.share for level in self.levels])
        if self.level < len(self.levels) - 1:
            chances[:] = 0
            errors = np.array([1.03 - self.accuracy.get(k, 0.5) for k in range(self.level)])
            chances[: self.level] = 0.33 * errors / max(errors.sum(), 1e-9)
            chances[self.level] = 1 - chances.sum()
        return chances / chances.sum()

    def note(self, level: int, accuracy: float) -> None:
        """Records the share of right answers in one step; goes on to the next level when due."""
        before = self.accuracy.get(level, accuracy)
        self.accuracy[level] = before * MEMORY + accuracy * (1 - MEMORY)
        self.steps_here += 1
        read = self.accuracy.get(self.level, 0.0) > self.levels[self.level].passed
        due = (read and self.steps_here > MIN_STEPS) or self.steps_here >= MAX_STEPS
        if due and self.level < len(self.levels) - 1:
            self.level += 1
            self.steps_here = 0


WEIGHTS = (0.0, 1.0, 0.7, 0.3)
"""Loss weight of each mark of `Batch.loss`: none, answer, rest of the answer, name."""
WARM_UP, DECAY_FROM = 100, 0.5
"""Steps of warm-up, and the share of all steps behind which the learning rate falls."""
MUON_RATE, ADAM_RATE = 0.02, 2e-3
"""Learning rates of a new reader after warm-up, before the final decrease."""
MAX_BYTES = 12_000_000
"""Of a shipped model's weights."""
SAVE_EVERY = 50
"""Steps between checkpoints; a run that was killed loses no more."""
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Settings:
    """What a run is made of; `tokens` are those of a batch, `batches` those of a step.

    The gradients of a step's batches are averaged.
    """

    out: Path
    steps: int = 1800
    seed: int = 0
    device: str = "cpu"
    tokens: int = 4096
    batches: int = 2
    curriculum: str = "reader"
    weights: Path | None = None


class Draws:
    """What each step of a run reads, from its number alone."""

    def __init__(self, settings: Settings, encoder: Encoder) -> None:
        self.settings, self.encoder = settings, encoder
        self.levels = CURRICULA[settings.curriculum]

    def of_step(self, step: int, chances: np.ndarray) -> tuple[int, list[Batch]]:
        """The level of a step, by the chances of each (levels,), and its batches."""
        seed, numbers = self.settings.seed, range(1, self.settings.batches + 1)
        level = int(np.random.default_rng([seed, step]).choice(len(self.levels), p=chances))
        rngs = (np.random.default_rng([seed, step, number]) for number in numbers)
        return level, [self.draw(level, rng) for rng in rngs]

    def draw(self, level: int, rng: np.random.Generator) -> Batch:
        """A batch of one level with about `tokens` tokens."""
        recipe = self.levels[level].recipe
        first = draw_sample(rng, recipe)
        count = self.settings.tokens // sum(len(part.ids) for part in self.encoder.parts(first))
        samples = [first, *(draw_sample(rng, recipe) for _ in range(count - 1))]
        return self.encoder.batch(samples, rng, recipe.jitter)


def losses_of(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, share of answers whose first token is right)."""
    # An explicit mask: without one, transformers would take gaps in the positions for the
    # borders of packed sequences.
    found = model.model(
        input_ids=batch.ids,
        attention_mask=torch.ones_like(batch.ids),
        position_ids=batch.positions,
        use_cache=False,
    )
    marks = batch.loss[:, 1:]
    chosen = marks > 0
    logits = model.lm_head(found.last_hidden_state[:, :-1][chosen]).float()
    target = batch.ids[:, 1:][chosen]
    first = marks[chosen] == ANSWER
    weights = logits.new_tensor(WEIGHTS)[marks[chosen]]
    right = (logits.detach().argmax(-1) == target)[first].float().mean()
    losses = F.cross_entropy(logits, target, reduction="none")
    return (losses * weights).sum() / weights.sum(), right


class Trainer:
    """One run: model, optimizers, curriculum and the generator of its data."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
        self.settings, self.data = settings, Draws(settings, Encoder(tokenizer))
        model = new_reader(tokenizer, settings.seed)
        if settings.weights is not None:
            start_from(model, settings.weights)
        self.model = model.to(settings.device)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        # Muon for the matrices, AdamW for embeddings, biases and norms.
        table = self.model.get_input_embeddings().weight
        matrices = [p for p in self.trained if p.ndim == 2 and p is not table]
        rest = [p for p in self.trained if p.ndim != 2 or p is table]
        rates = MUON_RATE, ADAM_RATE
        muon = torch.optim.Muon(
            matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
        )
        adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizers = dict[torch.optim.Optimizer, float](zip((muon, adam), rates, strict=True))
        self.curriculum = Curriculum(settings.curriculum)
        self.step, self.seconds = 0, 0.0

    @property
    def done(self) -> float:
        """How much of the run lies behind, from 0 to 1."""
        return min(1.0, self.step / self.settings.steps)

    def train_step(self) -> float:
        """One step over batches of one level; returns their loss."""
        settings, begun = self.settings, time.monotonic()
        level, batches = self.data.of_step(self.step, self.curriculum.chances())
        # Warm-up, constant, then a line down to 2%.
        tail = (1 - self.done) / (1 - DECAY_FROM)
        factor = min(1.0, (self.step + 1) / WARM_UP, max(0.02, tail))
        for optimizer, rate in self.optimizers.items():
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        losses, shares = [], []
        for batch in batches:
            there = Batch(*(tensor.to(settings.device, non_blocking=True) for tensor in batch))
            with torch.autocast(settings.device, torch.bfloat16):
                loss, share = losses_of(self.model, there)
            (loss / settings.batches).backward()
            losses.append(loss.detach())
            shares.append(share)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.curriculum.note(level, float(sum(shares)) / settings.batches)
        self.step += 1
        self.seconds += time.monotonic() - begun
        return float(sum(losses)) / settings.batches

    def save(self) -> None:
        """Writes a checkpoint in place of the last one."""
        path, course = self.settings.out / CHECKPOINT, self.curriculum
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "curriculum": (course.level, course.steps_here, course.accuracy),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def resume(self) -> None:
        """Goes on from the checkpoint, if there is one."""
        path = self.settings.out / CHECKPOINT
        if not path.exists():
            return
        state = torch.load(path, map_location=self.settings.device, weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        for optimizer, one in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(one)
        course = self.curriculum
        course.level, course.steps_here, course.accuracy = state["curriculum"]


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the folder that is shipped.

    Raises:
        ValueError: the weights are larger than `MAX_BYTES`, or out of fp16's range.
    """
    # The embeddings are tied: stored once.
    weights = {
        name: tensor.half().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    size = sum(tensor.nbytes for tensor in weights.values())
    if size > MAX_BYTES or not all(bool(one.isfinite().all()) for one in weights.values()):
        raise ValueError(f"{size} bytes of fp16 weights: over {MAX_BYTES}, or out of its range")
    tokenizer.save_pretrained(out)
    model.generation_config.do_sample = False
    model.generation_config.save_pretrained(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "dtype": "float32", "architectures": ["LlamaForCausalLM"]}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def train(settings: Settings) -> Trainer:
    """Trains a reader, or goes on with it; writes its folder and returns the finished trainer."""
    disable_progress_bar()
    tokenizer = train_tokenizer()
    trainer = Trainer(settings, tokenizer)
    settings.out.mkdir(parents=True, exist_ok=True)
    trainer.resume()
    while trainer.done < 1:
        loss = trainer.train_step()
        if trainer.step % SAVE_EVERY == 0 or trainer.done == 1:
            trainer.save()
            minutes, right = trainer.seconds / 60, trainer.curriculum.accuracy
            log.info(
                "step %d, %.1f min, loss %.3f, right %s",
                *(trainer.step, minutes, loss),
                {k: round(v, 3) for k, v in sorted(right.items())},
            )
    export(trainer.model, tokenizer, settings.out)
    (settings.out / CHECKPOINT).unlink(missing_ok=True)
    return trainer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curriculum", choices=list(CURRICULA), default=Settings.curriculum)
    parser.add_argument("--weights", type=Path, help="folder of a model to go on from")
    parser.add_argument("--tokens", type=int, default=Settings.tokens, help="of a batch")
    parser.add_argument("--batches", type=int, default=Settings.batches, help="of a step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
