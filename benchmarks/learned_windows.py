"""Can a model learn to read windows side by side from its own answers? An adapter on window tokens.

    python -m benchmarks.learned_windows train --data NQ.jsonl.gz --model MODEL --out FOLDER
    python -m benchmarks.learned_windows ask ... --adapter FOLDER/200.pt --out FOLDER/200
    python -m benchmarks.learned_windows differ FOLDER/200/pcw.json OTHER/pcw.json

The student reads five passages as `pcw` does: windows at shared positions, each behind the system
prompt, with a LoRA that is active on window tokens alone, so that a question without passages is
untouched. Its teacher is the same model, which reads the right passage alone; the loss is the
Kullback-Leibler divergence on the teacher's own answer. Nothing of this is in the product: see
benchmarks/results/learned_windows.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from rag_windows import Passage
from rag_windows.calibration import bag_f1, chatrag_words, contains
from rag_windows.prompt.builder import Prompt

TRAINED = 150
"""The first questions of the file are for training, the others for figures."""

PASSAGES = 5
INSTRUCTION = "Answer the question from the passages, in a few words."
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class OnWindows(nn.Module):
    """A linear layer with a LoRA (https://arxiv.org/abs/2106.09685) on the tokens of windows."""

    mask: torch.Tensor | None = None  # (tokens,) bool, one for all layers; None for none

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `nn.Linear.forward`."""
        made: torch.Tensor = self.base(x)
        if OnWindows.mask is None:
            return made
        added = (x.float() @ self.down.T) @ self.up.T
        return made + torch.where(OnWindows.mask.unsqueeze(-1), added, 0.0).to(made.dtype)


def adapted(model: PreTrainedModel, rank: int) -> list[OnWindows]:
    """Put a LoRA on every projection of the decoder's layers."""
    model.requires_grad_(False)
    made = []
    for module in list(model.modules()):
        for name in PROJECTIONS:
            base = getattr(module, name, None)
            if isinstance(base, nn.Linear):
                setattr(module, name, OnWindows(base, rank))
                made.append(getattr(module, name))
    return made


@dataclass(frozen=True)
class Asked:
    """A question with its passages as windows, and the right one."""

    question: str
    answers: list[str]
    prefix: list[int]
    windows: list[list[int]]
    right: int
    query: list[int]


def questions(path: Path, tokenizer: Any, seeds: int, chosen: slice) -> Iterator[Asked]:
    """Questions of the file with so many draws of other passages each."""
    prompt = Prompt(tokenizer)
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()[chosen]
    for seed in range(seeds):
        for number, line in enumerate(lines):
            one = json.loads(line)
            draw = random.Random(1000 * seed + number)
            right, *others = one["ctxs"]
            read = [right, *draw.sample(others, PASSAGES - 1)]
            draw.shuffle(read)
            passages = [Passage(each["text"], title=each["title"]) for each in read]
            parts = prompt.build(one["question"], passages, prefix=INSTRUCTION)
            yield Asked(
                one["question"],
                one["answers"],
                [*parts.prefix_ids],
                [[*window.ids] for window in parts.windows],
                read.index(right),
                [*parts.query_ids],
            )


def packed(
    prefix: Sequence[int], windows: Sequence[Sequence[int]], last: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions, mask (1, 1, tokens, tokens) and which tokens are a window's, of one row."""
    ids, positions, owner = [*prefix], [*range(len(prefix))], [0] * len(prefix)
    for number, window in enumerate(windows, 1):
        ids += window
        positions += range(len(prefix), len(prefix) + len(window))
        owner += [number] * len(window)
    start = len(prefix) + max(map(len, windows), default=0)
    ids += last
    positions += range(start, start + len(last))
    owner += [-1] * len(last)
    owners = torch.tensor(owner)
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    same = owners.unsqueeze(1) == owners.unsqueeze(0)
    seen &= same | (owners == 0).unsqueeze(0) | (owners == -1).unsqueeze(1)
    return torch.tensor([ids]), torch.tensor([positions]), seen[None, None], owners > 0


def logits_of(
    model: PreTrainedModel,
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    last: Sequence[int],
    wanted: int,
    *,
    learned: bool,
) -> torch.Tensor:
    """(wanted, vocabulary) fp32 of the last tokens."""
    ids, positions, mask, own = packed(prefix, windows, last)
    OnWindows.mask = own if learned else None
    output = model(
        ids, position_ids=positions, attention_mask=mask, use_cache=False, logits_to_keep=wanted
    )
    OnWindows.mask = None
    return torch.as_tensor(output.logits)[0].float()


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    ends: set[int],
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    tokens: int,
    *,
    learned: bool,
) -> list[int]:
    """Greedy tokens: windows side by side (one window is an ordinary prompt)."""
    ids, positions, mask, own = packed(prefix, windows, query)
    cache = DynamicCache()
    OnWindows.mask = own if learned else None
    output = model(
        ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    OnWindows.mask = None
    made: list[int] = []
    place = int(positions[0, -1])
    while True:
        made.append(int(output.logits[0, -1].argmax()))
        if made[-1] in ends or len(made) == tokens:
            return made
        place += 1
        output = model(
            torch.tensor([made[-1:]]),
            position_ids=torch.tensor([[place]]),
            past_key_values=cache,
            use_cache=True,
        )


def loaded(path: str) -> tuple[PreTrainedModel, Any, set[int]]:
    """Model, tokenizer, and tokens that end an answer."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    ends = model.generation_config.eos_token_id
    return model.eval(), tokenizer, {*([ends] if isinstance(ends, int) else ends)}


def train(options: argparse.Namespace) -> None:
    """Train, with the adapter written every 100 steps, until the steps or the minutes are over."""
    torch.manual_seed(0)
    model, tokenizer, ends = loaded(options.model)
    layers = adapted(model, options.rank)
    weights = [one for layer in layers for one in (layer.down, layer.up)]
    optimizer = torch.optim.AdamW(weights, lr=options.rate, weight_decay=0.0)
    options.out.mkdir(parents=True, exist_ok=True)
    told: dict[str, list[int]] = {}
    begun = time.monotonic()
    losses: list[float] = []
    rows = questions(options.data, tokenizer, 99, slice(0, TRAINED))
    for step, asked in enumerate(rows, 1):
        right = asked.windows[asked.right]
        if asked.question not in told:
            told[asked.question] = answer(
                model, ends, asked.prefix, [right], asked.query, 24, learned=False
            )
        own = told[asked.question]
        last = [*asked.query, *own[:-1]]
        with torch.no_grad():
            teacher = logits_of(model, asked.prefix, [right], last, len(own), learned=False)
        student = logits_of(model, asked.prefix, asked.windows, last, len(own), learned=True)
        loss = nn.functional.kl_div(
            student.log_softmax(-1),
            teacher.log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
        (loss / options.batch).backward()
        losses.append(float(loss))
        if step % options.batch == 0:
            warm = min(1.0, step / (20 * options.batch))
            optimizer.param_groups[0]["lr"] = options.rate * warm
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        minutes = (time.monotonic() - begun) / 60
        over = step == options.steps or minutes > options.minutes
        if step % 20 == 0:
            mean = sum(losses[-20:]) / 20
            print(f"step {step}: divergence {mean:.3f} nats, {minutes:.1f} minutes", flush=True)
        if step % 100 == 0 or over:
            torch.save([(one.down.data, one.up.data) for one in layers], options.out / f"{step}.pt")
        if over:
            return


def ask(options: argparse.Namespace) -> None:
    """Answer questions that were not trained on; prints a line each, and the sums."""
    model, tokenizer, ends = loaded(options.model)
    if options.adapter is not None:
        saved = torch.load(options.adapter, weights_only=True)
        layers = adapted(model, len(saved[0][0]))
        for layer, (down, up) in zip(layers, saved, strict=True):
            layer.down.data, layer.up.data = down, up
    chosen = slice(TRAINED, TRAINED + options.limit)
    figures: dict[str, list[tuple[float, float]]] = {}
    for asked in questions(options.data, tokenizer, 1, chosen):
        together = [token for window in asked.windows for token in window]
        ways = {"pcw": (asked.windows, options.adapter is not None)}
        if options.adapter is None:
            ways |= {
                "one prompt": ([together], False),
                "right passage alone": ([asked.windows[asked.right]], False),
            }
        for name, (windows, learned) in ways.items():
            ids = answer(model, ends, asked.prefix, windows, asked.query, 32, learned=learned)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            words = chatrag_words(text)
            right = any(contains(text, one) for one in asked.answers)
            overlap = max(bag_f1(words, chatrag_words(one)) for one in asked.answers)
            figures.setdefault(name, []).append((float(right), overlap))
            print(json.dumps({"way": name, "question": asked.question, "answer": text}), flush=True)
    for name, pairs in figures.items():
        share, mean = (100 * sum(one) / len(pairs) for one in zip(*pairs, strict=True))
        print(json.dumps({"way": name, "questions": len(pairs), "right": share, "f1": mean}))
        (options.out / f"{name}.json").write_text(json.dumps(pairs), encoding="utf-8")


def differ(files: Sequence[Path]) -> None:
    """Print right answers and F1 of one file of `ask`, or of the first less the second.

    Percent, with 95% intervals of 10,000 paired draws of questions.
    """
    read = [100 * np.array(json.loads(path.read_text(encoding="utf-8"))) for path in files]
    values = read[0] if len(read) == 1 else read[0] - read[1]
    draws = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5], axis=0)
    for place, name in enumerate(("right", "f1")):
        mean = values[:, place].mean()
        print(f"{name} {mean:.1f} ({low[place]:.1f} to {high[place]:.1f}), {len(values)} questions")


def main() -> None:
    """Read the command line."""
    if sys.argv[1:2] == ["differ"]:
        differ([Path(name) for name in sys.argv[2:4]])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["train", "ask"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--batch", type=int, default=4, help="questions an update")
    parser.add_argument("--steps", type=int, default=1000, help="questions read")
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--limit", type=int, default=100)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (train if options.what == "train" else ask)(options)


if __name__ == "__main__":
    main()
