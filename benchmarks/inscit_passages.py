"""INSCIT's turns as questions that bring their passages, for `rag-windows eval citations`.

    python benchmarks/inscit_passages.py dev.json --out inscit.jsonl
    rag-windows eval citations --data inscit.jsonl --passages 5 --every-answer --model MODEL

Of each turn with evidence in at most four passages: these, marked as right, and the other passages
that BM25 finds for the last three messages. The order of turns is drawn by the seed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from rag_windows_eval.inscit import InscitTask
from rag_windows_retrievers import BM25Retriever

MOST_RIGHT, PASSAGES, SEARCHED = 4, 5, 12


def rows(data: str) -> list[dict[str, object]]:
    """The questions of a file, in its order."""
    task = InscitTask.read(data)
    retriever, made = BM25Retriever(task.pool), list[dict[str, object]]()
    for example in task.examples:
        if not 1 <= len(example.evidence) <= MOST_RIGHT:
            continue
        said = [message["content"] for message in example.conversation]
        found = retriever.retrieve(" ".join(said[-3:]), SEARCHED)
        others = [one for one in found if one.id not in example.evidence]
        read = [*example.passages, *others][:PASSAGES]
        passages = [
            {"text": one.text, "title": one.title, "right": one.id in example.evidence}
            for one in read
        ]
        answers = [one.text for one in example.references]
        made.append({"id": example.key, "question": said, "answers": answers, "passages": passages})
    return made


def main() -> None:
    """Write questions as JSON lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", help="INSCIT's dev.json or test.json")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    made = rows(given.data)
    random.Random(given.seed).shuffle(made)
    given.out.write_text("\n".join(map(json.dumps, made)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
