from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sentence_transformers import CrossEncoder

from rag_windows import InputError, ModelLoadError
from rag_windows_retrievers import BM25Retriever, Reranker
from tests.retrievers.small import CORPUS, save_cross_encoder


@pytest.fixture
def model(tmp_path: Path) -> CrossEncoder:
    return CrossEncoder(str(save_cross_encoder(tmp_path)), device="cpu")


def test_passages_are_ordered_by_the_models_scores(model: CrossEncoder) -> None:
    reranker = Reranker(BM25Retriever(CORPUS), model)
    hits = reranker.rerank("old bridge", CORPUS)
    texts = [f"{one.title}\n{one.text}" if one.title else one.text for one in CORPUS]
    scores = model.predict([("old bridge", text) for text in texts], show_progress_bar=False)
    expected = sorted(zip(scores.tolist(), (one.id for one in CORPUS), strict=True), reverse=True)
    assert len({score for score, _ in expected}) == len(CORPUS)
    assert [one.id for one in hits] == [name for _, name in expected]
    assert [one.score for one in hits] == pytest.approx([score for score, _ in expected], abs=1e-5)
    assert len(Reranker(BM25Retriever(CORPUS), model, candidates=1).retrieve("old bridge", 3)) == 3
    assert reranker.rerank("old bridge", []) == reranker.retrieve("xylophone") == []


def test_what_is_refused(model: CrossEncoder, tmp_path: Path) -> None:
    found = BM25Retriever(CORPUS)
    with pytest.raises(ModelLoadError, match="can't be loaded"):
        Reranker(found, tmp_path / "nothing")
    torch.manual_seed(0)
    three = save_cross_encoder(tmp_path / "three", outputs=3)
    with pytest.raises(InputError, match="has 3 outputs"):
        Reranker(found, three, device="cpu")
