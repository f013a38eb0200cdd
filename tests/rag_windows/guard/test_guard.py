"""When the guard reads the passages in the ordinary way, and what it tells."""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from rag_windows import Generation, Guard, WindowedLM
from rag_windows.background import CancelledGenerationError, Watch
from rag_windows.calibration.spread import mass_spread
from rag_windows.errors import InputError
from rag_windows.guard.divergence import jensen_shannon
from tests.rag_windows import small

PASSAGES = ["The tower is old.", "The river is wide.", "The bridge is new.", "The lamp is lit."]
SILENT = Guard(passages=0, disagreement=None)
ALWAYS = Guard(passages=0, disagreement=0.0)


def ask(fallback: Any = None, passages: Any = PASSAGES, **options: Any) -> Generation:
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    return small.lm().generate("What?", passages, fallback=fallback, **options)


def test_few_short_passages_are_read_in_one_prompt() -> None:
    seen: list[tuple[int, int]] = []
    made = ask(
        Guard(passages=4, tokens=400), on_encoded=lambda done, total: seen.append((done, total))
    )
    assert made.fallback is not None
    assert made.fallback.signal == "few short passages"
    assert made.fallback.taken
    assert 60 < made.fallback.measured < made.fallback.threshold == 400
    assert "4 passages" in made.fallback.message
    assert seen == [(1, 1)]  # no window was encoded for it
    assert made.windows == ()
    ordinary = ask(method="sequential")
    assert made.token_ids == ordinary.token_ids
    assert made.citations == ordinary.citations
    assert made.usage == ordinary.usage
    json.dumps(made.fallback.as_dict())


@pytest.mark.parametrize("guard", [Guard(passages=3), Guard(passages=4, tokens=20)])
def test_more_or_longer_passages_are_not_few_or_short(guard: Guard) -> None:
    found = ask(guard).fallback
    assert found is None or found.signal != "few short passages"


def test_defaults_by_name() -> None:
    made = ask("sequential", PASSAGES[:2])
    assert made.fallback is not None
    assert made.fallback.signal == "few short passages"


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 3}, {"num_beams": 2}, {"link_tokens": 3}]
)
def test_a_silent_guard_changes_nothing(options: dict[str, Any]) -> None:
    guarded, plain = ask(SILENT, **options), ask(**options)
    assert guarded.fallback is None
    assert guarded.token_ids == plain.token_ids
    assert guarded.citations == plain.citations
    # Measured, and found to be well: nothing of the measurement is left in the answer.
    measured = ask(Guard(passages=0, disagreement=9.0, spread=1.0), **options)
    assert measured.fallback is None
    assert measured.token_ids == plain.token_ids


def test_disagreement_by_hand() -> None:
    """Windows alone are one-window contexts; their weights are the attention of the answer."""
    lm = small.lm()
    made = ask(Guard(passages=0, disagreement=0.0, rows=3, asked=3))
    assert made.fallback is not None
    assert made.fallback.signal == "disagreement"
    assert made.token_ids == ask(method="sequential").token_ids
    masses = [citation.mass for citation in ask(max_new_tokens=3).citations or ()]
    best = sorted(range(4), key=lambda index: -masses[index])[:3]
    parts = lm._request("What?", PASSAGES, prefix=None, method=None).parts
    rows = []
    for index in best:
        context = lm.encode_ids(parts.prefix_ids, [parts.windows[index].ids])
        rows.append(lm.logits(context, parts.query_ids)[-1].double().softmax(-1))
    weights = torch.tensor([masses[index] ** 2 for index in best], dtype=torch.float64)
    weights /= weights.sum()
    mixture = sum(weight * row for weight, row in zip(weights, rows, strict=True))
    entropy = [-(row * row.log()).sum() for row in (mixture, *rows)]
    expected = entropy[0] - sum(w * e for w, e in zip(weights, entropy[1:], strict=True))
    assert made.fallback.measured == pytest.approx(float(expected), abs=1e-5)
    above = ask(Guard(passages=0, disagreement=float(expected) + 0.01, rows=3, asked=3))
    assert above.fallback is None


def test_spread_of_the_first_tokens() -> None:
    masses = [citation.mass for citation in ask(max_new_tokens=5).citations or ()]
    expected = mass_spread(masses)
    assert 0 < expected < 1
    guard = Guard(passages=0, disagreement=None, spread=expected - 0.01, rows=5)
    found = ask(guard).fallback
    assert found is not None
    assert (found.signal, found.taken) == ("multi-hop", True)
    assert found.measured == pytest.approx(expected, abs=1e-6)
    guard = Guard(passages=0, disagreement=None, spread=expected + 0.01, rows=5)
    assert ask(guard).fallback is None


def test_the_profile_s_threshold_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer())
    profile = SimpleNamespace(guard={"threshold": 0.0})
    monkeypatch.setattr(lm, "profile", profile, raising=False)

    def signal(guard: Guard) -> str | None:
        made = lm.generate("What?", PASSAGES, max_new_tokens=3, fallback=guard)
        return None if made.fallback is None else made.fallback.signal

    assert signal(SILENT) == "multi-hop"
    assert signal(Guard(passages=0, disagreement=None, spread=math.inf)) is None


def test_windows_where_one_prompt_would_not_fit() -> None:
    passages = [f"{name} {'x' * 300}" for name in "abcd"]
    made = ask(ALWAYS, passages)
    assert made.fallback is not None
    assert not made.fallback.taken
    assert "they don't fit" in made.fallback.message
    assert "positions" in made.fallback.message
    plain = ask(None, passages)
    assert made.token_ids == plain.token_ids
    assert len(made.windows) == 4


@pytest.mark.parametrize("options", [{"method": "sequential"}, {"passages": ()}])
def test_nothing_to_guard(options: dict[str, Any]) -> None:
    assert ask(ALWAYS, **options).fallback is None


def test_an_ensemble_has_no_attention_to_measure() -> None:
    assert ask(ALWAYS, method="ensemble").fallback is None
    few = ask(Guard(passages=9), method="ensemble").fallback
    assert few is not None
    assert few.taken


@pytest.mark.parametrize("guard", [None, SILENT, ALWAYS, "sequential"])
def test_a_stream_is_exactly_the_generation(guard: Any) -> None:
    whole = ask(guard)
    chunks = list(
        small.lm().stream("What?", PASSAGES, max_new_tokens=12, do_sample=False, fallback=guard)
    )
    assert "".join(chunk.text for chunk in chunks) == whole.text
    last = chunks[-1].generation
    assert last is not None
    assert (last.token_ids, last.fallback) == (whole.token_ids, whole.fallback)


def test_who_stops_the_answer_stops_the_measurement() -> None:
    watch = Watch()
    steps = 0

    class Counting(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if steps == 3:
                watch.cancel()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    options = watch.options({"stopping_criteria": [Counting()]})
    ask(Guard(passages=0, spread=1.0, rows=200), **{**options, "max_new_tokens": 200})
    assert steps < 10
    with pytest.raises(CancelledGenerationError):
        watch.check()


def test_threads_with_other_guards() -> None:
    guards = [None, SILENT, ALWAYS, Guard(passages=4)] * 2
    alone = [ask(guard) for guard in guards]
    found: list[Any] = [None] * len(guards)

    def work(index: int) -> None:
        found[index] = ask(guards[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(guards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.token_ids, one.fallback) for one in found] == [
        (one.token_ids, one.fallback) for one in alone
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        {"passages": -1},
        {"tokens": 1.5},
        {"rows": 0},
        {"asked": 1},
        {"passages": True},
        {"disagreement": -0.1},
        {"spread": math.nan},
        {"disagreement": "high"},
    ],
)
def test_numbers_outside_their_domain_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(numbers))):
        Guard(**numbers)


@pytest.mark.parametrize("fallback", ["pcw", True, 1])
def test_an_unknown_fallback_is_refused(fallback: Any) -> None:
    with pytest.raises(InputError, match="'sequential' or a Guard"):
        small.lm().stream("What?", PASSAGES, fallback=fallback)


def test_jensen_shannon() -> None:
    same = torch.log(torch.tensor([[0.2, 0.8], [0.2, 0.8]]))
    assert jensen_shannon(same, torch.tensor([1.0, 3.0])) == pytest.approx(0, abs=1e-7)
    apart = torch.log(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert jensen_shannon(apart, torch.tensor([2.0, 2.0])) == pytest.approx(math.log(2))
    uneven = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert jensen_shannon(apart, torch.tensor([1.0, 3.0])) == pytest.approx(uneven)
