"""Trains an adapter on windows: a question over windows is to be answered as over the right one.

The student reads passages as `METHOD` does: windows side by side behind the system prompt, encoded
with the adapter. Its teacher is the same model without the adapter, which reads the right
passages alone. The loss is the Kullback-Leibler divergence from the teacher's probabilities on its
own answer (distillation of context, https://arxiv.org/abs/2209.15189). There are no labels and no
other model. The questions of a lesson share its windows, which makes them several times cheaper.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import kl_div

from rag_windows import BatchRequest, Passage, WindowedLM
from rag_windows.calibration import ModelFingerprint
from rag_windows.errors import InputError, LimitError, UnsupportedModelError
from rag_windows.kv import Window
from rag_windows.loading import input_device
from rag_windows.methods import resolve
from rag_windows.prefill import EncodedContext, read_by
from rag_windows.request import Request
from rag_windows.window_adapter import FILE, Made, encoder_of, gradients_unchanged, view_for_adapter
from rag_windows_adapt.lessons import Asked, Lesson

STATE = "training.pt"
"""In the adapter's folder while it is not finished: from where training goes on."""

WARM_UP = 10
"""Updates over which the learning rate rises; it then falls to `LEAST_RATE` of itself."""

LEAST_RATE = 0.1
METHOD = "aligned+pcw"
"""Where windows begin together, the longest is nearest to the question, which no training of what
windows hold undoes."""
LARGEST_GRADIENT = 1.0
MOST_LEFT_OUT = 16
"""First lessons that may all be too long for the model before training gives up."""
CHECKPOINT_S = 120.0


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How an adapter is trained.

    Attributes:
        questions: at which training ends.
        passages: of a lesson, which are read together.
        update: lessons an update of the weights.
        rank: of the LoRA (https://arxiv.org/abs/2106.09685) on every linear layer of the decoder.
        rate: learning rate of AdamW.
        instruction: system prompt of the questions.
        seed: of lessons and first weights.
    """

    questions: int = 1000
    passages: int = 5
    update: int = 4
    rank: int = 16
    rate: float = 3e-4
    instruction: str | None = None
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """How far training is.

    Attributes:
        lessons: taken or left out.
        left_out: lessons that the model has no positions for.
        divergence: of each lesson that was taken, the mean of its questions, in nats a token.
        seconds: of all sessions together, with those of the writing of questions.
    """

    lessons: int = 0
    left_out: int = 0
    questions: int = 0
    updates: int = 0
    divergence: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Trainer:
    """An adapter in training, for a loaded model that stays as it is.

    Raises:
        UnsupportedModelError: its windows share no attention, or PEFT can't adapt it.
    """

    def __init__(self, lm: WindowedLM, plan: TrainingPlan) -> None:
        if lm.engine.in_rows:
            raise UnsupportedModelError(
                "This model reads each passage in a row of its own, so that there is no shared "
                "attention to learn for. Use it as it is."
            )
        self.lm, self.plan, self.progress = lm, plan, Progress()
        self._method = resolve(METHOD)
        # PEFT draws the first weights on the CPU.
        with torch.random.fork_rng(devices=[]), gradients_unchanged(lm.model):
            torch.default_generator.manual_seed(plan.seed)
            config = LoraConfig(
                r=plan.rank,
                lora_alpha=2 * plan.rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
            self._adapted: PeftModel = get_peft_model(view_for_adapter(lm.model), config)
            self._weights = [one for one in self._adapted.parameters() if one.requires_grad]
        self._made_for = dataclasses.asdict(ModelFingerprint.of(lm.model))
        self._writer = encoder_of(self._adapted)
        self._optimizer = torch.optim.AdamW(self._weights, lr=plan.rate, weight_decay=0.0)
        self._waiting = 0

    def learn(self, lesson: Lesson) -> float:
        """Take one lesson; every few of them update the weights. Returns its divergence.

        Raises:
            LimitError: its passages and a question do not fit the model's positions.
        """
        with gradients_unchanged(self.lm.model):
            self.lm.model.requires_grad_(False)
            loss = self._loss(lesson)
            loss.div(self.plan.update).backward()
        self.progress.lessons += 1
        self._waiting += 1
        self.progress.questions += len(lesson.asked)
        self.progress.divergence.append(float(loss.detach()))
        if self._waiting == self.plan.update:
            self._update()
        return self.progress.divergence[-1]

    def _loss(self, lesson: Lesson) -> torch.Tensor:
        """The mean divergence of its questions, nats a token."""
        requests = [self._request(asked, lesson.passages) for asked in lesson.asked]
        parts, plan = requests[0].parts, requests[0].plan
        prefix, reader = [*plan.prefix_ids], self.lm.engine.plain_encoder
        windows = [(one.passage, (*one.ids,)) for one in parts.windows]
        start = len(prefix)
        [head] = reader.run([prefix], [0], None) if prefix else [None]
        # Texts of equal length stand side by side in a pass.
        ordered = sorted(plan.windows, key=lambda one: len(one.ids))
        encoded = self._writer.run(
            [one.ids for one in ordered], [one.start for one in ordered], head, gradients=True
        )
        student = self._context(prefix, head, encoded)
        right = [
            tuple(
                token
                for place in asked.right
                for passage, ids in windows
                if passage == place
                for token in ids
            )
            for asked in lesson.asked
        ]
        alone = sorted(set(right), key=len)
        read = dict(zip(alone, reader.run(alone, [start] * len(alone), head), strict=True))
        fed = [
            [*request.parts.query_ids, *asked.answer[:-1]]
            for request, asked in zip(requests, lesson.asked, strict=True)
        ]
        found = self._logits(student, fed, gradients=True)
        losses = []
        for row, (asked, text, ids) in enumerate(zip(lesson.asked, right, fed, strict=True)):
            answer = slice(len(ids) - len(asked.answer), len(ids))
            teacher = self._logits(self._context(prefix, head, [read[text]]), [ids])
            losses.append(_divergence(found[row, answer], teacher[0, answer]))
        return torch.stack(losses).mean()

    @property
    def updated(self) -> bool:
        """Whether all lessons that were taken are in the weights."""
        return not self._waiting

    def _update(self) -> None:
        self.progress.updates += 1
        self._waiting = 0
        warm = min(1.0, self.progress.updates / WARM_UP)
        left = max(LEAST_RATE, 1.0 - self.progress.questions / self.plan.questions)
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.rate * warm * left
        torch.nn.utils.clip_grad_norm_(self._weights, LARGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _request(self, asked: Asked, passages: Sequence[Passage]) -> Request:
        """A question as the adapted model will be asked it; refused where it does not fit."""
        question = asked.question if isinstance(asked.question, str) else list(asked.question)
        request = BatchRequest(
            question,
            passages,
            prefix=self.plan.instruction,
            method=self._method,
            max_new_tokens=len(asked.answer),
        )
        return Request.of(self.lm.engine, request)

    def _context(
        self, prefix: Sequence[int], head: Window | None, windows: Sequence[Window]
    ) -> EncodedContext:
        method, count = self._method, len(windows)
        return EncodedContext(
            prefix_ids=tuple(prefix),
            prefix=head,
            method=method,
            query_start=max(window.end for window in windows),
            windows=read_by(method, windows, range(count), count, ()),
            lengths=tuple(len(window.ids) for window in windows),
            groups=tuple(range(count)),
            n_groups=count,
        )

    def _logits(
        self, context: EncodedContext, fed: Sequence[Sequence[int]], *, gradients: bool = False
    ) -> torch.Tensor:
        """Logits (rows, tokens, vocabulary), those behind a shorter row without meaning."""
        longest = max(map(len, fed))
        rows = [[*ids, *[0] * (longest - len(ids))] for ids in fed]
        ids = torch.tensor(rows, device=input_device(self.lm.model))
        return self.lm.engine.decoder.forward(context, ids, gradients=gradients)

    def save(self, folder: Path, *, finished: bool = False) -> None:
        """Write the adapter as it is now, and from where training goes on.

        Lessons since the last update make one by themselves.
        """
        if self._waiting:
            self._update()
        self._adapted.save_pretrained(str(folder))
        trained = {
            **dataclasses.asdict(self.plan),
            "questions": self.progress.questions,
            "lessons": self.progress.lessons,
            "left_out": self.progress.left_out,
            "hours": round(self.progress.seconds / 3600, 3),
            "divergence": [round(one, 4) for one in self.progress.divergence],
        }
        _replace(
            folder / FILE,
            Made(method=METHOD, model=self._made_for, trained=trained)
            .model_dump_json(indent=1)
            .encode(),
        )
        if finished:
            (folder / STATE).unlink(missing_ok=True)
            return
        unfinished = folder / f"{STATE}.part"
        state = {
            "plan": dataclasses.asdict(self.plan),
            "progress": dataclasses.asdict(self.progress),
            "weights": [one.data for one in self._weights],
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, unfinished)
        unfinished.replace(folder / STATE)

    def resume(self, folder: Path) -> bool:
        """Go on from where training stood; False if nothing is there.

        Raises:
            InputError: the folder's training had other settings.
        """
        if not (folder / STATE).exists():
            return False
        state = torch.load(folder / STATE, weights_only=True, map_location="cpu")
        own, asked = state["plan"], dataclasses.asdict(self.plan)
        # More questions than first asked for may be wanted.
        if other := [
            name for name in asked if name != "questions" and own.get(name) != asked[name]
        ]:
            raise InputError(
                f"The training in {folder} has other settings: {', '.join(other)}. Give the same "
                "ones, or another folder."
            )
        shapes = [one.shape for one in state["weights"]]
        if shapes != [one.shape for one in self._weights]:
            raise InputError(
                f"The training in {folder} is of another model. Give its model, or another folder."
            )
        for weight, stored in zip(self._weights, state["weights"], strict=True):
            weight.data.copy_(stored)
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return True


def train(
    trainer: Trainer,
    lessons: Iterable[Lesson],
    folder: Path,
    *,
    until: Callable[[], bool] = lambda: False,
    on_lesson: Callable[[Progress], None] = lambda _: None,
) -> bool:
    """Take lessons until the plan's questions are answered; returns whether they are.

    The adapter is written now and then, and at the end, whatever ends it. Lessons that were taken
    before (`Trainer.resume`) are passed over, so they have to come in the same order. Those that
    are too long for the model's positions are left out and counted.

    Args:
        until: asked after each lesson whether to stop before.
        on_lesson: called after each lesson.

    Raises:
        LimitError: none of the first `MOST_LEFT_OUT` lessons fits the model.
    """
    progress, plan = trainer.progress, trainer.plan
    began, written = time.monotonic() - progress.seconds, time.monotonic()
    finished, before = progress.questions >= plan.questions, progress.questions
    try:
        if not finished:
            for lesson in islice(lessons, progress.lessons, None):
                try:
                    if lesson.asked:
                        trainer.learn(lesson)
                    else:
                        progress.lessons += 1
                except LimitError:
                    progress.lessons += 1
                    progress.left_out += 1
                    if MOST_LEFT_OUT <= progress.left_out == progress.lessons:
                        raise
                progress.seconds = time.monotonic() - began
                on_lesson(progress)
                finished = progress.questions >= plan.questions
                if finished or until():
                    break
                if trainer.updated and time.monotonic() - written > CHECKPOINT_S:
                    trainer.save(folder)
                    written = time.monotonic()
    finally:
        if progress.questions > before:
            trainer.save(folder, finished=finished)
    return finished


def _divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) in nats a token, of logits (tokens, vocabulary)."""
    own, other = (logits.float().log_softmax(-1) for logits in (student, teacher))
    return kl_div(own, other, log_target=True, reduction="batchmean")


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)
