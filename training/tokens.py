"""Token ids: the tokenizer with its template, and sequences as tensors.

The tokenizer is byte-level BPE over the world's words. Every word of the world is one token, at the
start of a line and after a space; any other text falls back to shorter pieces and, in the end, to
bytes, so that it always comes back as it went in.

A sequence is the prefix, the passages one after another, and a conversation of several questions
and answers. It is tokenized part by part, exactly as a prompt is cut into windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.phrasing import NOT_STATED, all_forms
from training.samples import Sample
from training.world import COMMON, KINDS, LABELS, MADE_UP, SYSTEM_PROMPTS, NamesOf

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
CONTROL = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)
VOCABULARY_SIZE = 6144

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('the roles are system, user and assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def words() -> list[str]:
    """Every word that should be one token, sorted, without duplicates."""
    found: set[str] = {*COMMON, *MADE_UP, *LABELS}
    for kind in KINDS:
        found.update(kind.firsts, kind.seconds)
        for values in kind.relations.values():
            if not isinstance(values, NamesOf):
                found.update(word for value in values for word in value.split(" "))
    for text in [*all_forms(), *SYSTEM_PROMPTS, NOT_STATED]:
        found.update(re.findall(r"[A-Za-z]+", text.replace("{n}", "").replace("{v}", "")))
    return sorted(found)


def _lines(repeat: int) -> Iterable[str]:
    for word in words():
        # Twice as many of the spaced form: where the vocabulary ends, this is what must be in.
        yield from [f"{word} {word} {word}\n"] * repeat
    yield from ["a.\n\n", "a, b? c's d! (e) - f: g\n", "1 2 3 4 5 6 7 8 9 0\n"] * repeat


def train_tokenizer(size: int = VOCABULARY_SIZE) -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same words always give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_lines(4), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def space_twins(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """Pairs (id of a word, id of the same word behind a space) of the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    return sorted(
        (i, vocabulary["Ġ" + token])
        for token, i in vocabulary.items()
        if token not in CONTROL and "Ġ" + token in vocabulary
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))


ANSWER, REST, NAME = 1, 2, 3
PASSAGE_GAP, QUERY_GAP = 16, 256
"""Jitter: greatest gaps in the positions, in tokens, before a passage and before the questions."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded sequences.

    `ids`, `positions`: (batch, length) int64. `loss`: (batch, length) int64, `ANSWER` at the first
    token of an answer, `REST` at its other tokens and its end, `NAME` at the second word of a name
    that was mentioned before, 0 elsewhere.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    loss: torch.Tensor


class Encoder:
    """Turns samples into token ids, part by part, with loss marks and positions."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        ids = {t: int(tokenizer.convert_tokens_to_ids(t)) for t in tokenizer.all_special_tokens}
        self.begin, self.end = ids["<|begin|>"], ids["<|end|>"]
        self.system, self.user = ids["<|system|>"], ids["<|user|>"]
        self.assistant, self.pad = ids["<|assistant|>"], ids["<|pad|>"]

    def text(self, text: str) -> list[int]:
        """The ids of plain text; never a control token."""
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids)

    def name_marks(self, ids: Sequence[int], name: str) -> list[int]:
        """`NAME` wherever the second word of the full name follows the first, else 0."""
        first, second = name.split(" ")
        before = {self.text(first)[0], self.text(" " + first)[0]}
        after = self.text(" " + second)[0]
        pairs = zip([-1, *ids[:-1]], ids, strict=True)
        return [NAME if b in before and a == after else 0 for b, a in pairs]

    def parts(self, sample: Sample) -> list[tuple[list[int], list[int]]]:
        """(ids, loss marks) of the prefix, of each passage and, last, of the conversation."""
        head = [self.begin]
        if sample.system is not None:
            head += [self.system, *self.text(sample.system), self.end]
        parts = [[*head, self.user, *self.text(sample.before)]]
        for title, text in sample.passages:
            parts.append(self.text(f"{title}\n{text}\n\n" if title else f"{text}\n\n"))
        marked = [(parts[0], [0] * len(parts[0]))]
        for ids, (title, _) in zip(parts[1:], sample.passages, strict=True):
            if title is None:
                marked.append((ids, [0] * len(ids)))
                continue
            names = self.name_marks(ids, title)
            # The title itself comes out of nowhere.
            names[: len(self.text(title))] = [0] * len(self.text(title))
            marked.append((ids, names))
        ids, loss = [], []
        for n, turn in enumerate(sample.turns):
            question = [self.user] if n else []
            question += [*self.text(turn.question), self.end, self.assistant]
            answer = [*self.text(turn.answer), self.end]
            ids += question + answer
            loss += self.name_marks(question, turn.name) if turn.name else [0] * len(question)
            marks = [ANSWER] + [REST] * (len(answer) - 1)
            if turn.steps:
                marks[len(self.text(turn.steps))] = ANSWER
            loss += marks
        return [*marked, (ids, loss)]

    def batch(self, samples: Sequence[Sample], rng: np.random.Generator, jitter: float) -> Batch:
        """Encodes samples; with chance `jitter` each gets gaps in its positions between parts."""
        rows, marks, places = [], [], []
        for sample in samples:
            row: list[int] = []
            mark: list[int] = []
            place: list[int] = []
            parts = self.parts(sample)
            shifted = rng.random() < jitter
            position = 0
            for n, (ids, loss) in enumerate(parts):
                if shifted and n:
                    last = n == len(parts) - 1
                    position += int(rng.integers(0, QUERY_GAP if last else PASSAGE_GAP))
                row += ids
                mark += loss
                place += range(position, position + len(ids))
                position += len(ids)
            rows.append(row)
            marks.append(mark)
            places.append(place)
        shape = (len(rows), max(map(len, rows)))
        ids_, loss_ = torch.full(shape, self.pad), torch.zeros(shape, dtype=torch.int64)
        positions = torch.zeros(shape, dtype=torch.int64)
        for i, (row, mark, place) in enumerate(zip(rows, marks, places, strict=True)):
            ids_[i, : len(row)] = torch.tensor(row)
            loss_[i, : len(mark)] = torch.tensor(mark)
            positions[i, : len(place)] = torch.tensor(place)
        return Batch(ids_, positions, loss_)
