from __future__ import annotations

import pytest

from rag_windows import APE, InputError, LimitError, Passage, WindowedLM
from rag_windows.icl import scoring
from rag_windows.prefill import EncodedContext, Encoder
from tests.parity import engine, zoo
from tests.rag_windows import small

PASSAGES = ["The tower is old.", "The river is wide."]
CHOICES = ["yes", "n", "perhaps not"]


def by_hand(
    prefix: list[int], windows: list[list[int]], query: list[int], choice: list[int]
) -> float:
    lm = small.lm()
    context = lm.encode_ids(prefix, windows, method=APE(0.8, 0.9))
    rows = lm.logits(context, [*query, *choice])[len(query) - 1 : -1].log_softmax(-1)
    return float(sum(rows[i, token] for i, token in enumerate(choice)))


@pytest.mark.parametrize("passages", [PASSAGES, []])
def test_a_score_is_the_sum_of_its_log_probabilities(passages: list[str]) -> None:
    lm = small.lm()
    scores = lm.score("Is it?", passages, CHOICES, method=APE(0.8, 0.9), prefix="Be brief.")
    prompt = lm.engine.text.prompt
    parts = prompt.build("Is it?", [Passage(p) for p in passages], prefix="Be brief.")
    for score, choice in zip(scores, CHOICES, strict=True):
        ids = prompt.encode_text(choice, continuation=True)
        expected = by_hand(
            list(parts.prefix_ids), [list(w.ids) for w in parts.windows], list(parts.query_ids), ids
        )
        assert score.choice == choice
        assert score.tokens == len(ids)
        assert score.logprob == pytest.approx(expected, abs=1e-4)
        assert score.mean_logprob == pytest.approx(expected / len(ids), abs=1e-3)


QUERIES = ["Is it?", "What is it then, after all?", "Why?", "And is it?", "Who?"]


@pytest.mark.parametrize("passages", [PASSAGES, []])
@pytest.mark.parametrize("choices", [CHOICES, ["a", "b"], ["maybe", "perhaps", "a"]])
def test_many_queries_get_the_scores_that_each_gets_alone(
    passages: list[str], choices: list[str]
) -> None:
    lm = small.lm()
    together = lm.score_batch(QUERIES, passages, choices, prefix="Be brief.")
    for query, scores in zip(QUERIES, together, strict=True):
        alone = lm.score(query, passages, choices, prefix="Be brief.")
        assert [one.choice for one in scores] == choices
        assert [one.logprob for one in scores] == pytest.approx(
            [one.logprob for one in alone], abs=1e-4
        )


def scored(
    lm: WindowedLM, context: EncodedContext, queries: list[list[int]], choices: list[list[int]]
) -> list[list[float]]:
    """Log-probabilities of each choice behind each query."""
    pairs = [(tuple(query), tuple(choice)) for query in queries for choice in choices]
    found = iter(scoring.likelihoods(lm.engine.decoder, context, pairs))
    return [[next(found).logprob for _ in choices] for _ in queries]


@pytest.mark.parametrize("method", ["pcw", "ensemble"])
@pytest.mark.parametrize("windows", [[[70, 71, 72], [90, 91]], []])
def test_passes_of_any_size_give_the_same(
    windows: list[list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = small.lm()
    context = lm.encode_ids([0, 4], windows, method=method)
    queries = [[9 + i, *range(40, 44 + i % 3)] for i in range(7)]
    choices = [[50], [51, 52, 53], [51, 52], [60, 61]]
    expected = scored(lm, context, queries, choices)
    for limit in ("MAX_ROW_TOKENS", "MAX_VALUES"):
        with monkeypatch.context() as patch:
            patch.setattr(scoring, limit, 30)
            alone = scored(lm, context, queries, choices)
        for one, other in zip(alone, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("windows", [[zoo.ids(9, 1), zoo.ids(14, 2)], []], ids=["windows", "plain"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3"])
def test_padded_rows_score_like_plain_ones(name: str, windows: list[list[int]]) -> None:
    lm = engine.shared(name)
    context = lm.encode_ids(zoo.ids(4, 0), windows)
    queries = [zoo.ids(length, length) for length in (3, 9, 5, 8, 7, 3)]
    choices = [zoo.ids(length, 20 + length) for length in (1, 4, 2)]
    for query, sums in zip(queries, scored(lm, context, queries, choices), strict=True):
        for choice, total in zip(choices, sums, strict=True):
            rows = lm.logits(context, [*query, *choice])[len(query) - 1 : -1].log_softmax(-1)
            expected = sum(float(rows[i, token]) for i, token in enumerate(choice))
            assert total == pytest.approx(expected, abs=1e-4)


def test_conversations_may_bring_prefixes_of_their_own() -> None:
    lm = small.lm()
    user = {"role": "user", "content": "Is it?"}
    system = {"role": "system", "content": "Be brief."}
    together = lm.score_batch([[user], [system, user], "Is it?"], PASSAGES, CHOICES)
    briefly = lm.score("Is it?", PASSAGES, CHOICES, prefix="Be brief.")
    freely = lm.score("Is it?", PASSAGES, CHOICES)
    for scores, expected in zip(together, [freely, briefly, freely], strict=True):
        assert [one.logprob for one in scores] == pytest.approx(
            [one.logprob for one in expected], abs=1e-4
        )
    assert briefly[0].logprob != pytest.approx(freely[0].logprob, abs=1e-3)


def test_the_longest_query_is_checked_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = small.lm()
    monkeypatch.setattr(Encoder, "prefill", lambda *_: pytest.fail("something was encoded"))
    with pytest.raises(LimitError, match="Passage 1 needs a window of 502 tokens"):
        lm.score_batch(["a", "b" * 600, "c"], ["d", "e" * 500], CHOICES)


def test_bad_queries_and_choices_are_refused() -> None:
    assert small.lm().score_batch([], PASSAGES, CHOICES) == []
    with pytest.raises(InputError, match="queries must be a list"):
        small.lm().score_batch("Is it?", PASSAGES, CHOICES)
    with pytest.raises(InputError, match="at least one choice"):
        small.lm().score("Is it?", PASSAGES, [])
    with pytest.raises(InputError, match="Choice 1 has no tokens"):
        small.lm().score("Is it?", PASSAGES, ["yes", ""])
