"""The codebook on the embedded reader: what it finds, what it answers, and how long it searches.

    python benchmarks/codebook.py [--questions 200] [--passages 64] [--seed 11] [--search-only]

Held-out single-hop questions, each over passages of its own of which one states the answer. The
search is timed over random keys of the embedded reader's size, 9 pages a passage.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rag_windows import PCW, Codebook, Passage, WindowedLM
from rag_windows.codebook.blocks import Blocks, rank, with_pages
from rag_windows.methods.key_search import KeySearch
from rag_windows.prefill import EncodedContext
from training.tasks import draw_case

FOUND: dict[str, Codebook] = {
    "retrieve=8": Codebook(retrieve=8),
    "retrieve=4": Codebook(retrieve=4),
    "retrieve=1": Codebook(retrieve=1),
    "retrieve=8, page=1": Codebook(retrieve=8, page=1),
    "retrieve=8, layers=(0, 1, 2, 3)": Codebook(retrieve=8, layers=(0, 1, 2, 3)),
    "retrieve=8, fusion='mean'": Codebook(retrieve=8, fusion="mean"),
}
ANSWERED = ("retrieve=8", "retrieve=8, fusion='mean'")
PAGES, WIDTH, QUERY = 9, 512, 12


def answer(lm: WindowedLM, context: EncodedContext, query: Sequence[int]) -> str:
    """The answer's text, greedily."""
    ids = lm.generate_ids(context, query, max_new_tokens=12)
    text = lm.tokenizer.decode(ids, skip_special_tokens=True)
    return str(text).strip()


def judge(questions: int, passages: int, seed: int) -> None:
    """Print how often the stating passage is chosen, and how often the answer is right."""
    lm = WindowedLM.from_pretrained("tiny-reader")
    rng = np.random.default_rng(seed)
    whole: list[bool] = []
    found: dict[str, list[bool]] = {name: [] for name in FOUND}
    right: dict[str, list[bool]] = {name: [] for name in ANSWERED}
    while len(whole) < questions:
        case = draw_case(rng, "single", passages)
        question = case.messages[-1]["content"]
        stating = [i for i, (title, _) in enumerate(case.passages) if title and title in question]
        if len(stating) != 1:
            continue
        given = [Passage(text, title=title) for title, text in case.passages]
        parts = lm.engine.text.prompt.build(list(case.messages), given)
        windows = [window.ids for window in parts.windows]
        every = Codebook(retrieve=passages)
        context = lm.encode_ids(parts.prefix_ids, windows, method=every)
        plain = replace(context, method=PCW())
        whole.append(answer(lm, plain, parts.query_ids) == case.answer)
        for name, method in FOUND.items():
            read = lm.engine.decoder.narrowed(replace(context, method=method), parts.query_ids)
            found[name].append(stating[0] in (read.chosen or ()))
            if name in right:
                right[name].append(answer(lm, read, parts.query_ids) == case.answer)
    print(f"all {passages} passages read: {np.mean(whole):.1%} right of {questions}")
    for name, hits in found.items():
        answered = f", {np.mean(right[name]):.1%} right" if name in right else ""
        print(f"{name}: found in {np.mean(hits):.1%}{answered}")


def search(passages: int) -> None:
    """Print the processor's time of one search."""
    blocks: Blocks = ()
    names = [str(number) for number in range(passages)]
    for first in range(0, passages, 1000):
        blocks = with_pages(
            blocks, {name: torch.randn(PAGES, WIDTH) for name in names[first : first + 1000]}
        )
    tokens = torch.randn(QUERY, WIDTH)
    rank(blocks, KeySearch(), tokens, names, 8)
    begun = time.process_time()
    for _ in range(5):
        rank(blocks, KeySearch(), tokens, names, 8)
    print(f"{passages:,} passages: {(time.process_time() - begun) * 200:.1f} ms a search")


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--passages", type=int, default=64)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--search-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in (1_000, 10_000):
        search(size)
    if not options.search_only:
        judge(options.questions, options.passages, options.seed)


if __name__ == "__main__":
    main()
