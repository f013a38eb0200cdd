"""Token ids: the tokenizer with its template, and sequences as tensors.

The tokenizer is byte-level BPE over the world's words. Every word of the world is one token, at the
start of a line and after a space; any other text falls back to shorter pieces and, in the end, to
bytes, so that it always comes back as it went in.

A sequence is the prefix, the passages one after another, and a conversation of several questions
and answers. It is tokenized part by part, exactly as a prompt is cut into windows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from training.samples import Sample
from training.world import COMMON, KINDS, LABELS, MADE_UP, NOT_STATED, SYSTEM_PROMPTS, NamesOf

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
    texts = [*SYSTEM_PROMPTS, NOT_STATED]
    for kind in KINDS:
        found.update(kind.firsts, kind.seconds)
        texts.append(kind.noun or "")
        for one in kind.relations.values():
            texts += [*one.statements, *one.questions, one.bridge or ""]
            if not isinstance(one.values, NamesOf):
                found.update(word for value in one.values for word in value.split(" "))
    for text in texts:
        found.update(re.findall(r"[A-Za-z]+", text.replace("{n}", "").replace("{v}", "")))
    return sorted(found)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same words always give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # Twice as many of the spaced form: where the vocabulary ends, this is what must be in.
    lines = [f"{word} {word} {word}\n" for word in words()]
    lines += ["a.\n\n", "a, b? c's d! (e) - f: g\n", "1 2 3 4 5 6 7 8 9 0\n"]
    tokenizer.train_from_iterator(lines * 4, trainer)
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


def spaced_pairs(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """Pairs (id of a word, id of the same word behind a space) of the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    return sorted(
        (i, vocabulary["Ġ" + token])
        for token, i in vocabulary.items()
        if token not in CONTROL and "Ġ" + token in vocabulary
    )


ANSWER, REST, NAME = 1, 2, 3
PASSAGE_GAP, QUERY_GAP = 16, 256
"""Jitter: greatest gaps in the positions, in tokens, before a passage and before the questions."""


class Part(NamedTuple):
    """Of a piece of a sequence: ids and loss marks by token."""

    ids: list[int]
    loss: list[int]


class Batch(NamedTuple):
    """Right-padded sequences.

    `ids`, `positions`: (batch, length) int64. `loss`: (batch, length) int64, `ANSWER` at the first
    token of an answer, `REST` at its other tokens and its end, `NAME` at the second word of a name
    that was mentioned before, 0 elsewhere.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    loss: torch.Tensor


def _passage(title: str | None, text: str) -> str:
    return f"{title}\n{text}\n\n" if title else f"{text}\n\n"


class Encoder:
    """Turns samples into token ids, part by part, with loss marks and positions."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        ids = tokenizer.convert_tokens_to_ids(list(CONTROL))
        self.pad, self.begin, self.end, self.system, self.user, self.assistant = ids

    def text(self, text: str) -> list[int]:
        """The ids of plain text; never a control token."""
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids)

    def name_marks(self, ids: Sequence[int], name: str | None) -> list[int]:
        """`NAME` wherever the second word of a full name follows the first, else 0."""
        if name is None or " " not in name:
            return [0] * len(ids)
        first, second = name.split(" ")
        before = {self.text(first)[0], self.text(" " + first)[0]}
        after = self.text(" " + second)[0]
        pairs = zip([-1, *ids[:-1]], ids, strict=True)
        return [NAME if b in before and a == after else 0 for b, a in pairs]

    def parts(self, sample: Sample) -> list[Part]:
        """The prefix, each passage and, last, the conversation."""
        head = [self.begin]
        if sample.system is not None:
            head += [self.system, *self.text(sample.system), self.end]
        head += [self.user, *self.text(sample.before)]
        parts = [Part(head, [0] * len(head))]
        for title, text in sample.passages:
            ids = self.text(_passage(title, text))
            # The title itself comes out of nowhere.
            known = len(self.text(title or ""))
            marks = [0] * known + self.name_marks(ids, title)[known:]
            parts.append(Part(ids, marks))
        ids, loss = [], []
        for n, turn in enumerate(sample.turns):
            question = [self.user] if n else []
            question += [*self.text(turn.question), self.end, self.assistant]
            answer = [*self.text(turn.answer), self.end]
            marks = [ANSWER] + [REST] * (len(answer) - 1)
            if turn.steps:
                marks[len(self.text(turn.steps))] = ANSWER
            ids += question + answer
            loss += self.name_marks(question, turn.name) + marks
        return [*parts, Part(ids, loss)]

    def batch(self, samples: Sequence[Sample], rng: np.random.Generator, jitter: float) -> Batch:
        """Encodes samples; with chance `jitter` each gets gaps in its positions between parts."""
        rows = []
        for sample in samples:
            row: list[int] = []
            marks: list[int] = []
            places: list[int] = []
            parts = self.parts(sample)
            shifted = rng.random() < jitter
            position = 0
            for n, (ids, loss) in enumerate(parts):
                if shifted and n:
                    last = n == len(parts) - 1
                    position += int(rng.integers(0, QUERY_GAP if last else PASSAGE_GAP))
                row += ids
                marks += loss
                places += range(position, position + len(ids))
                position += len(ids)
            rows.append((row, places, marks))
        padded = [
            pad_sequence([torch.tensor(one) for one in column], True, fill)
            for column, fill in zip(zip(*rows, strict=True), (self.pad, 0, 0), strict=True)
        ]
        return Batch(*padded)
