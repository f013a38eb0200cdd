"""What the lossy stored forms of the passage cache lose, and what they save.

    python benchmarks/cache_codec.py [--questions 200] [--passages 8] [--quick]

Loss, on the embedded reader: held-out questions (`training.tasks`), each over so many passages,
answered greedily from windows as computed and from windows that were stored and read back. "equal"
is the share of answers with the same tokens as without storing, "right" that of right answers. The
other columns compare logits at every token of the answer given without storing, prompted alike:
KL divergence (nats, from as computed to stored; mean and largest) and the largest difference of two
logits. The keys' and values' own error is relative to their root mean square.

Size, of one window of 256 tokens: bytes per token of the tensors, in theory and as stored, and what
a memory tier and a file hold for it. Times are medians for one window. About three minutes on one
core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows.cache.codec import codec_named
from rag_windows.cache.disk import DiskTier
from rag_windows.cache.entry import Entry
from rag_windows.cache.memory import MemoryTier
from rag_windows.kv import PackedWindows, Window
from rag_windows.prompt.builder import Prompt
from training.tasks import draw_case

FORMS = ("as computed", "fp8", "int8")
KEY = "0" * 64
TOKENS = 256
SHAPES = {
    "1B shape: 16 layers x 8 kv heads x 64": (16, 8, 64),
    "8B shape: 32 layers x 8 kv heads x 128": (32, 8, 128),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its right answer in token ids."""

    prefix: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, the logits at each of them (tokens, vocabulary), and the packed tensors."""

    ids: list[int]
    logits: torch.Tensor
    tensors: tuple[torch.Tensor, ...]


def ask(lm: WindowedLM, questions: int, passages: int) -> list[Question]:
    """Held-out questions, the same every time."""
    rng, prompt = np.random.default_rng([5, passages]), Prompt(lm.tokenizer)
    asked = []
    for _ in range(questions):
        case = draw_case(rng, "single", passages)
        texts = [Passage(text, title=title) for title, text in case.passages]
        parts = prompt.build(list(case.messages), texts)
        ids = tuple(window.ids for window in parts.windows)
        right = prompt.encode_text(case.answer, continuation=True)
        asked.append(Question(parts.prefix_ids, ids, parts.query_ids, right))
    return asked


def answer(lm: WindowedLM, question: Question, forced: list[int] | None) -> Answer:
    """Answer greedily; logits are those of the forced tokens, or of the answer's own."""
    context = lm.encode_ids(question.prefix, question.windows)
    ids = lm.generate_ids(context, question.query, max_new_tokens=12)
    given = ids if forced is None else forced
    logits = lm.logits(context, [*question.query, *given])[len(question.query) - 1 : -1]
    packed = context.windows
    tensors = (*packed.keys, *packed.values) if isinstance(packed, PackedWindows) else ()
    return Answer(ids, logits, tensors)


def loss(lm: WindowedLM, questions: Sequence[Question]) -> None:
    """Print a row for each form."""
    exact = [answer(lm, question, None) for question in questions]
    print("| stored as | equal | right | KL mean | KL largest | logit error | key/value error |")
    print("|---|---|---|---|---|---|---|")
    for form in FORMS:
        stored = lm.with_cache(PassageCache(memory="1GiB", store=form))
        equal = right = 0
        divergences, logit_errors, errors = [], [], []
        for question, wanted in zip(questions, exact, strict=True):
            answer(stored, question, wanted.ids)  # stores
            got = answer(stored, question, wanted.ids)  # reads back
            equal += got.ids == wanted.ids
            right += got.ids[:-1] == question.answer  # behind it, the end token
            p, q = wanted.logits.log_softmax(-1), got.logits.log_softmax(-1)
            divergences += (p.exp() * (p - q)).sum(-1).tolist()
            logit_errors.append(float((wanted.logits - got.logits).abs().max()))
            errors.append(relative_error(wanted.tensors, got.tensors))
        count = len(questions)
        print(
            f"| {form} | {equal / count:.1%} | {right / count:.1%} "
            f"| {statistics.fmean(divergences):.2g} | {max(divergences):.2g} "
            f"| {max(logit_errors):.2g} | {statistics.fmean(errors):.2%} |",
            flush=True,
        )


def relative_error(exact: Sequence[torch.Tensor], lossy: Sequence[torch.Tensor]) -> float:
    """Root mean square of the differences over that of the numbers."""
    pairs = zip(exact, lossy, strict=True)
    wrong = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    return (wrong / sum(float(a.float().square().sum()) for a in exact)) ** 0.5


def sizes(name: str, window: Window, repeats: int) -> None:
    """Print what a window takes in each form."""
    tensors = (*window.keys, *window.values)
    numbers = sum(tensor.numel() for tensor in tensors) / len(window.ids)
    channels = sum(tensor.shape[0] * tensor.shape[2] for tensor in tensors)
    entry = Entry(window, 1.0, (), 0.0)
    for form in FORMS:
        codec = codec_named(form)
        stored = codec.encode(window)
        if codec.exact:
            theory = sum(tensor.nbytes for tensor in tensors) / len(window.ids)
        else:
            theory = numbers + 4 * channels / len(window.ids)
        memory = MemoryTier(1 << 40, form)
        memory.put(KEY, entry)
        with tempfile.TemporaryDirectory() as folder:
            disk = DiskTier(folder, 1 << 40, form)
            disk.put(KEY, entry)
            held = [tier.stats().bytes / len(window.ids) for tier in (memory, disk)]
            disk.close()
        encode = median_ms(partial(codec.encode, window), repeats)
        decode = median_ms(partial(codec.decode, stored, window.ids, window.start), repeats)
        print(
            f"| {name}, {str(tensors[0].dtype).removeprefix('torch.')} | {form} | {theory:,.0f} "
            f"| {stored.nbytes / len(window.ids):,.0f} | {held[0]:,.0f} | {held[1]:,.0f} "
            f"| {encode:.2f} | {decode:.2f} |",
            flush=True,
        )


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one call."""
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        spent.append(1000 * (time.perf_counter() - begin))
    return statistics.median(spent)


def random_window(layers: int, heads: int, width: int) -> Window:
    """256 tokens in bf16."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(heads, TOKENS, width, generator=generator).bfloat16() for _ in range(2 * layers)
    ]
    return Window(tuple(range(TOKENS)), 0, tuple(tensors[:layers]), tuple(tensors[layers:]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="few questions, the reader alone")
    options = parser.parse_args()
    questions, repeats = (3, 1) if options.quick else (options.questions, 15)
    torch.set_num_threads(1)
    lm = WindowedLM.from_pretrained("tiny-reader")
    print(f"Embedded reader, {questions} questions over {options.passages} passages:\n")
    asked = ask(lm, questions, options.passages)
    loss(lm, asked)
    print("\nBytes per token, and milliseconds per window of 256 tokens:\n")
    print("| window | stored as | theory | tensors | memory tier | file | encode | decode |")
    print("|---|---|---|---|---|---|---|---|")
    context = lm.encode_ids((), [[1 + index % 50 for index in range(TOKENS)]])
    packed = context.windows
    if isinstance(packed, PackedWindows):
        reader = Window(tuple(range(TOKENS)), 0, packed.keys, packed.values)
        sizes("embedded reader", reader, repeats)
    for name, shape in ({} if options.quick else SHAPES).items():
        sizes(name, random_window(*shape), repeats)


if __name__ == "__main__":
    main()
