from __future__ import annotations

import pytest

from rag_windows import InputError, LimitError
from rag_windows.icl import scoring
from tests.parity import engine, zoo
from tests.rag_windows import small

PASSAGES = ["The tower is old.", "The river is wide."]
CHOICES = ["yes", "n", "perhaps not"]


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
        assert [one.tokens for one in scores] == [len(choice) for choice in choices]
        assert scores[0].mean_logprob == scores[0].logprob / scores[0].tokens


@pytest.mark.parametrize("windows", [[zoo.ids(9, 1), zoo.ids(14, 2)], []], ids=["windows", "plain"])
@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "pcw"), ("qwen3", "pcw"), ("gpt2", "pcw"), ("gemma3", "pcw"), ("llama", "ensemble")],
)
def test_passes_of_any_size_score_like_plain_rows(
    name: str, method: str, windows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = engine.shared(name)
    context = lm.encode_ids(zoo.ids(4, 0), windows, method=method)
    queries = [zoo.ids(length, length) for length in (3, 9, 5, 8, 7, 3)]
    choices = [zoo.ids(length, 20 + length) for length in (1, 4, 2)]
    expected = []
    for query in queries:
        for choice in choices:
            rows = lm.logits(context, [*query, *choice])[len(query) - 1 : -1].log_softmax(-1)
            expected.append(sum(float(rows[i, token]) for i, token in enumerate(choice)))
    pairs = [(tuple(query), tuple(choice)) for query in queries for choice in choices]
    for limit in ("", "MAX_ROW_TOKENS", "MAX_VALUES"):
        with monkeypatch.context() as patch:
            if limit:
                patch.setattr(scoring, limit, 30)
            found = scoring.likelihoods(lm.engine.decoder, context, pairs)
        assert [one.logprob for one in found] == pytest.approx(expected, abs=1e-4)


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


def test_the_longest_query_is_checked_before_any_work() -> None:
    with (
        small.passes() as made,
        pytest.raises(LimitError, match="Passage 1 needs a window of 502 tokens"),
    ):
        small.lm().score_batch(["a", "b" * 600, "c"], ["d", "e" * 500], CHOICES)
    assert not made


def test_bad_queries_and_choices_are_refused() -> None:
    assert small.lm().score_batch([], PASSAGES, CHOICES) == []
    with pytest.raises(InputError, match="queries must be a list"):
        small.lm().score_batch("Is it?", PASSAGES, CHOICES)
    with pytest.raises(InputError, match="at least one choice"):
        small.lm().score("Is it?", PASSAGES, [])
    with pytest.raises(InputError, match="Choice 1 has no tokens"):
        small.lm().score("Is it?", PASSAGES, ["yes", ""])
