"""The shipped reader: what its card says must be true of the files."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from rag_windows import WindowedLM
from rag_windows.loading import embedded_path
from training.corpus_answers import SAMPLES, Asker, ask_all, converse, rows
from training.evaluate import evaluate
from training.export import MAX_BYTES
from training.initialise import positional_attention
from training.vocabulary import train_tokenizer

FOLDER = embedded_path("tiny-reader")


@pytest.fixture(scope="module")
def reader() -> WindowedLM:
    return WindowedLM.from_pretrained("tiny-reader")


def test_weights_are_small_and_computed_with_in_fp32(reader: WindowedLM) -> None:
    assert sum(path.stat().st_size for path in Path(FOLDER).iterdir()) < MAX_BYTES
    assert reader.model.dtype == torch.float32


def test_positional_heads_are_as_claimed(reader: WindowedLM) -> None:
    assert isinstance(reader.model, LlamaForCausalLM)
    assert min(positional_attention(reader.model, 200)) > 0.88
    assert int(reader.model.model.layers[0].self_attn.q_proj.weight.count_nonzero()) == 0


def test_tokenizer_is_the_trainer_s() -> None:
    shipped = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    assert shipped["model"] == json.loads(train_tokenizer().backend_tokenizer.to_str())["model"]


def test_card_states_figures_and_the_frozen_heads() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("python -m training.evaluate", "entity-blind", "frozen", "Limits"):
        assert word in card
    assert "@" not in card


def test_it_reads_eight_passages_far_better_than_a_blind_reader(reader: WindowedLM) -> None:
    cells = evaluate(reader, ["single"], [8], ["sequential", "pcw", "ape:0.9:0.9"], 30, 9)
    for cell in cells:
        assert cell.blind < 0.4
        assert cell.right >= 25, cell


def test_it_answers_the_sample_corpus_and_follows_its_conversations(reader: WindowedLM) -> None:
    asker = Asker(reader, SAMPLES, 16)
    scores = {s.task: s for s in ask_all(asker, rows(SAMPLES, "questions.jsonl"), "ape:0.9:0.9")}
    assert scores["single"].total + scores["not stated"].total == 100
    assert scores["single"].right + scores["not stated"].right >= 85
    followed = converse(asker, rows(SAMPLES, "conversations.jsonl"), "ape:0.9:0.9")
    assert followed.right >= 20


@pytest.mark.parametrize("method", ["sequential", "pcw", "ape"])
def test_it_follows_up_with_a_pronoun_and_ends_its_answers(reader: WindowedLM, method: str) -> None:
    passages = [
        {"title": "Alra Ashden", "text": "Alra Ashden lives in Arava. Alra Ashden keeps a dog."},
        {"title": "Belra Dorby", "text": "Belra Dorby lives in Velum. Belra Dorby keeps a fox."},
    ]
    messages = [{"role": "user", "content": "Where does Belra Dorby live?"}]
    first = reader.generate(messages, passages, method=method)
    assert (first.text, first.finish_reason) == ("Velum", "stop")
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Which animal does she keep?"},
    ]
    assert reader.generate(messages, passages, method=method).text == "fox"
