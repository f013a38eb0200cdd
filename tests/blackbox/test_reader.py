"""The shipped reader and sample corpus: what their cards say must be true of the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rag_windows import WindowedLM
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents
from tests.drawn import questions

SAMPLES = Path(__file__).parents[2] / "rag_windows" / "samples"
FOLDER = SAMPLES.parent / "models" / "tiny-reader"
PATTERNS = ((1, 1), (2, 2), (3, 4), (5, 8))
"""The first and the last token back that each head of layer 0 looks at."""


@pytest.fixture(scope="module")
def reader() -> WindowedLM:
    return WindowedLM.from_pretrained("tiny-reader")


@torch.no_grad()
def positional_attention(model: LlamaForCausalLM, length: int) -> list[float]:
    """Layer 0's attention of each head to its pattern, from the last of `length` tokens."""
    model.set_attn_implementation("eager")
    ids = torch.arange(length)[None] % model.config.vocab_size
    weights = model(ids, output_attentions=True).attentions[0][0, :, -1]
    return [
        float(weights[head, length - 1 - last : length - first].sum())
        for head, (first, last) in enumerate(PATTERNS)
    ]


@pytest.mark.parametrize("length", [12, 64, 1500])
def test_positional_heads_look_where_claimed(length: int) -> None:
    shipped = LlamaForCausalLM.from_pretrained(FOLDER)
    assert min(positional_attention(shipped, length)) > 0.88
    assert int(shipped.model.layers[0].self_attn.q_proj.weight.count_nonzero()) == 0


def test_the_shipped_folder_is_what_its_card_says(reader: WindowedLM) -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12_000_000
    assert reader.model.dtype == torch.float32
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("Figures", "entity-blind", "frozen", "Limits"):
        assert word in card


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "pcw", "ape"])
def test_it_reads_eight_passages_far_better_than_a_blind_reader(
    reader: WindowedLM, method: str
) -> None:
    """Who knows the kind of entity and the relation but not the entity: right in 14%."""
    cases = questions("8 passages")
    asked = [
        {
            "query": case.question,
            "passages": case.passages,
            "method": method,
            "max_new_tokens": 32,
            "do_sample": False,
        }
        for case in cases
    ]
    made = reader.generate_batch(asked)
    pairs = zip(made, cases, strict=True)
    assert sum(one.text.strip() == case.answer for one, case in pairs) >= 25


def lines(name: str) -> list[dict[str, Any]]:
    text = (SAMPLES / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_it_answers_the_sample_corpus_and_its_conversations(reader: WindowedLM) -> None:
    documents = load_documents([SAMPLES / "corpus"]).documents
    retriever = BM25Retriever(split_documents(documents))

    def answers(asked: list[tuple[list[dict[str, str]], str]]) -> list[str]:
        made = reader.generate_batch(
            [
                {
                    "query": messages,
                    "passages": retriever.retrieve(search, 16),
                    "max_new_tokens": 12,
                    "do_sample": False,
                }
                for messages, search in asked
            ]
        )
        return [one.text.strip() for one in made]

    questions = lines("questions.jsonl")
    asked = [([{"role": "user", "content": q["question"]}], q["question"]) for q in questions]
    pairs = zip(answers(asked), questions, strict=True)
    assert sum(answer == question["answer"] for answer, question in pairs) >= 85
    followed, wanted = [], []
    for before, after in (row["turns"] for row in lines("conversations.jsonl")):
        said = (("user", before["question"]), ("assistant", before["answer"]))
        talk = [*said, ("user", after["question"])]
        messages = [{"role": role, "content": text} for role, text in talk]
        followed.append((messages, f"{before['question']} {after['question']}"))
        wanted.append(after["answer"])
    assert sum(map(str.__eq__, answers(followed), wanted)) >= 20
