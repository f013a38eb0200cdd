"""An ensemble behind the text interface: streams, stops, scores, citations, errors, wrappers."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from rag_windows import (
    DeepThinking,
    InputError,
    ParallelEnsemble,
    Passage,
    PassageCache,
    WindowedLM,
)
from rag_windows.methods import PCW, resolve
from rag_windows.results import Generation
from tests.rag_windows import small

PASSAGES = [
    Passage("The tower is old.", score=0.2),
    Passage("The river is wide and deep, and cold in spring.", title="River", score=0.9),
    Passage("Bread.", score=0.4),
]
ENTROPY = ParallelEnsemble(weights="entropy")


def ask(lm: WindowedLM | None = None, passages: Any = PASSAGES, **options: Any) -> Generation:
    arguments = {"method": ENTROPY, "max_new_tokens": 12, **options}
    return (lm or small.lm()).generate("What?", passages, **arguments)


class Written(LogitsProcessor):
    """Makes the model write "a" again and again, and calls back at every step."""

    def __init__(self, at_step: Any = lambda _: None) -> None:
        self.count = 0
        self._at_step = at_step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self._at_step(self.count)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, small.tokenizer().convert_tokens_to_ids("a")] = 0.0
        return chosen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": ParallelEnsemble(weights="retrieval"), "do_sample": True, "seed": 4},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2, "seed": 1},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_a_stream_is_exactly_the_generation(options: dict[str, Any]) -> None:
    arguments = {"method": ENTROPY, "max_new_tokens": 12, **options}
    whole = ask(**options)
    chunks = list(small.lm().stream("What?", PASSAGES, **arguments))
    last = chunks[-1].generation
    assert last is not None
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert (last.token_ids, last.finish_reason) == (whole.token_ids, whole.finish_reason)
    for one in (whole, *whole.alternatives):
        assert one.citations is not None
        assert one.prefix_mass is not None
        assert one.query_mass is not None
        masses = [citation.mass for citation in one.citations]
        assert min(masses) > 0
        assert sum(masses) + one.prefix_mass + one.query_mass == pytest.approx(1, abs=1e-5)


def test_stop_strings_and_processors() -> None:
    whole = ask(stop="aaa", logits_processor=LogitsProcessorList([Written()]))
    assert (whole.text, whole.finish_reason) == ("", "stop")
    assert len(whole.token_ids) == 3


def test_closing_a_stream_ends_the_work() -> None:
    go_on = threading.Event()
    steps = Written(lambda count: go_on.wait(20) if count == 3 else None)
    stream = small.lm().stream(
        "What?",
        PASSAGES,
        method=ENTROPY,
        max_new_tokens=500,
        logits_processor=LogitsProcessorList([steps]),
    )
    assert isinstance(stream, Generator)
    next(stream)
    go_on.set()
    stream.close()
    assert steps.count < 100


def test_citations_are_weights_times_the_rows_attention() -> None:
    """Windows of one length: each row is that window read alone."""
    lm, prefix, query = small.lm(), [0, 9, 30], [44, 21, 7]
    windows = [[50 + i, 60 + 2 * i, 70, 12 + i] for i in range(3)]
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}

    def masses(context: Any, forced: list[int] | None = None) -> tuple[list[int], torch.Tensor]:
        kept: dict[str, Any] = dict(options)
        if forced is not None:
            kept["logits_processor"] = [Forced(forced)]
        decoded = lm.engine.decoder.generate(context, query, options=kept, record_weights=True)
        recorder = decoded.recorder
        assert recorder is not None
        first = recorder.first_position
        steps = [recorder.average([first + step], [0]) for step in range(3)]
        return decoded.sequences[0], torch.stack(steps)

    scores = (1.0, 0.2, 0.5)
    method = ParallelEnsemble(weights="retrieval")
    tokens, found = masses(lm.encode_ids(prefix, windows, method=method, scores=scores))
    expected = torch.zeros_like(found)
    for number, weight in enumerate(torch.softmax(torch.tensor(scores), dim=0)):
        alone = lm.encode_ids(prefix, [windows[number]], method=PCW())
        _, rows = masses(alone, tokens)
        expected[:, number] += weight * rows[:, 0]
        expected[:, -2:] += weight * rows[:, -2:]
    assert torch.allclose(found, expected, atol=1e-5)


class Forced(LogitsProcessor):
    """Writes given tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, next(self._tokens)] = 0.0
        return chosen


def test_the_retriever_decides() -> None:
    """With scores far apart the answer is that of the best passage, here the longest."""
    scored = [Passage(p.text, title=p.title, score=100.0 * (p.score or 0)) for p in PASSAGES]
    method = ParallelEnsemble(weights="retrieval")
    best = ask(passages=[PASSAGES[1]], method="pcw").token_ids
    assert ask(passages=scored, method=method).token_ids == best
    assert ask(method=method).token_ids != best


def test_a_missing_score_is_told_before_any_work() -> None:
    told: list[int] = []
    with pytest.raises(InputError, match=r"Passage 1\b.*score"):
        ask(
            passages=[PASSAGES[0], "Unscored."],
            method=ParallelEnsemble(weights="retrieval"),
            on_encoded=lambda done, _: told.append(done),
        )
    assert not told


def test_scores_are_sums_of_combined_log_probabilities() -> None:
    lm, choices = small.lm(), ["a", "river", "old"]
    scores = lm.score("What?", PASSAGES, choices, method=ENTROPY)
    parts = lm.engine.request("What?", PASSAGES, method=ENTROPY, prefix=None).parts
    context = lm.encode_ids(
        parts.prefix_ids, [window.ids for window in parts.windows], method=ENTROPY
    )
    for score, choice in zip(scores, choices, strict=True):
        ids = small.tokenizer()(choice, add_special_tokens=False)["input_ids"]
        rows = lm.logits(context, [*parts.query_ids, *ids])[len(parts.query_ids) - 1 : -1]
        total = rows.gather(1, torch.tensor(ids).unsqueeze(1)).sum().item()
        assert score.logprob == pytest.approx(total, abs=1e-4)


def test_a_cache_changes_nothing() -> None:
    cached = small.lm().with_cache(PassageCache("16MiB"))
    fresh = ask()
    assert ask(cached).token_ids == fresh.token_ids
    again = ask(cached)
    assert again.token_ids == fresh.token_ids
    assert again.usage.cached_tokens > 0


def test_wrappers_that_change_windows_are_heard() -> None:
    method = resolve("deep-thinking+ensemble")
    assert method == DeepThinking(reader=ParallelEnsemble())
    lm, prefix, windows, query = small.lm(), [0, 9], [[50, 60, 70], [51, 61]], [44, 21]
    strong = DeepThinking(steps=2, eta=0.9, reader=ParallelEnsemble())
    refined = lm.logits(lm.encode_ids(prefix, windows, method=strong), query)
    plain = lm.logits(lm.encode_ids(prefix, windows, method="ensemble"), query)
    assert (refined - plain).abs().max() > 1e-3
    alone = DeepThinking(steps=2, eta=0.9)
    one = lm.logits(lm.encode_ids(prefix, windows[:1], method=strong), query)
    expected = lm.logits(lm.encode_ids(prefix, windows[:1], method=alone), query)
    assert torch.allclose(one, expected.log_softmax(-1), atol=1e-4)
