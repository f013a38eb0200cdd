"""Encoders and passages small enough to check by hand."""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from rag_windows import Passage
from rag_windows_retrievers import (
    BM25Retriever,
    ConversationalRetriever,
    DenseRetriever,
    HybridRetriever,
    Index,
    Progress,
    Reranker,
    Retriever,
)

CORPUS = [
    Passage("The bridge of Halden was built in 1931.", id="bridge", metadata={"page": 7}),
    Passage("A harbour lies behind the dunes.", id="harbour", title="Halden"),
    Passage("Zürich has lakes. Who knows why?", id="lakes"),
    Passage("Bakers sell bread in the morning.", id="bread", title="Old town"),
    Passage("The old bridge has five arches of stone.", id="arches"),
]


def ranking(passages: Sequence[Passage]) -> list[tuple[str | None, object]]:
    """Ids and scores, which equal those of a ranking computed in another order of additions."""
    return [(one.id, pytest.approx(one.score, abs=1e-5)) for one in passages]


class WordEncoder:
    """A vector per text out of its words' checksums; equal words, equal direction.

    `asked` counts the passages' texts that were embedded.
    """

    def __init__(self, name: str = "words", dimension: int = 64) -> None:
        self.name = self._seed = name
        self.dimension = dimension
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        if not query:
            with self._lock:
                self.asked += texts
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.casefold()):
                seed = zlib.crc32(f"{self._seed} {word}".encode())
                vectors[row] += np.random.default_rng(seed).standard_normal(self.dimension)
            vectors[row] /= np.linalg.norm(vectors[row]) or 1.0
            if progress is not None:
                progress(row + 1, len(texts))
        return vectors


def save_cross_encoder(folder: Path, *, outputs: int = 1) -> Path:
    """A cross-encoder of a few thousand random weights that knows the words of `CORPUS`."""
    words = {word for one in CORPUS for word in one.text.lower().replace(".", " ").split()}
    vocabulary = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(words)])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=outputs,
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def indexed(folder: Path, passages: Sequence[Passage], encoder: WordEncoder | None) -> Index:
    """An index on disk that holds some passages."""
    made = Index(folder / "index", encoder)
    made.add_passages(passages)
    return made


MADE: dict[str, Callable[[Path, Sequence[Passage]], Retriever]] = {
    "bm25": lambda _, passages: BM25Retriever(passages),
    "dense": lambda _, passages: DenseRetriever(passages, WordEncoder()),
    "hybrid": lambda _, passages: HybridRetriever(
        [BM25Retriever(passages), DenseRetriever(passages, WordEncoder())]
    ),
    "index": lambda folder, passages: indexed(folder, passages, None),
    "index with vectors": lambda folder, passages: indexed(folder, passages, WordEncoder()),
    "conversational": lambda _, passages: ConversationalRetriever(BM25Retriever(passages)),
    "reranker": lambda folder, passages: Reranker(
        DenseRetriever(passages, WordEncoder()), save_cross_encoder(folder), device="cpu"
    ),
}
"""Every retriever of the package, made with a folder for its files and its passages."""
