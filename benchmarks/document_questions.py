"""Questions over documents, with the chunks that BM25 finds, for `rag-windows eval passages`.

    python benchmarks/document_questions.py chunking_eval --out documents.jsonl
    rag-windows eval passages --data documents.jsonl --methods sequential,auto --model MODEL

The folder is that of Chroma's chunking evaluation (github.com/brandonstarxel/chunking_evaluation):
`questions_df.csv`, whose questions name the sentences of a document that answer them, and the
documents. Each question gets the chunks of its document that BM25 puts first; those that hold a
part of such a sentence are right, and the sentences together are the answer. Questions whose
sentences no chunk among them holds are left out. Their order is drawn by the seed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

from rag_windows_retrievers import BM25Retriever, Document, split_documents

DOCUMENTS = ("wikitexts", "state_of_the_union", "pubmed", "finance")
"""Of the folder; chat logs are no documents that people wrote."""
CHUNKS = 8


def text_of(folder: Path, name: str) -> str:
    """A document as it stands, so that the places of sentences hold."""
    packed = folder / f"{name}.md.gz"
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else None
    return (data or (folder / f"{name}.md").read_bytes()).decode("utf-8")


def rows(folder: Path, chunks: int) -> Iterator[dict[str, object]]:
    """The questions of all documents."""
    with (folder / "questions_df.csv").open(encoding="utf-8", newline="") as file:
        asked = list(csv.DictReader(file))
    for name in DOCUMENTS:
        document = Document(text_of(folder, name), id=name)
        retriever = BM25Retriever(split_documents(document))
        for number, row in enumerate(one for one in asked if one["corpus_id"] == name):
            spans = json.loads(row["references"])
            found = retriever.retrieve(row["question"], chunks)
            right = [
                any(
                    span["start_index"] < one.metadata["end"]
                    and one.metadata["start"] < span["end_index"]
                    for span in spans
                )
                for one in found
            ]
            if any(right):
                yield {
                    "id": f"{name}/{number}",
                    "question": row["question"],
                    "answers": [" ".join(span["content"] for span in spans)],
                    "passages": [
                        {"text": one.text, "title": one.title, "before": one.before, "right": held}
                        for one, held in zip(found, right, strict=True)
                    ],
                }


def main() -> None:
    """Write questions as JSON lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with questions_df.csv and the documents")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="of each question")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    made = list(rows(given.folder, given.chunks))
    random.Random(given.seed).shuffle(made)
    given.out.write_text("\n".join(map(json.dumps, made)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
