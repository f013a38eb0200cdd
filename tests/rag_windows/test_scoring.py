from __future__ import annotations

import pytest
import torch

from rag_windows import APE, Passage
from rag_windows.errors import InputError
from rag_windows.scoring import score_ids
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
    prompt = lm._text().prompt
    parts = prompt.build("Is it?", [Passage(p) for p in passages], prefix="Be brief.")
    for score, choice in zip(scores, CHOICES, strict=True):
        ids = prompt.encode_text(choice, continuation=True)
        expected = by_hand(
            list(parts.prefix_ids), [list(w.ids) for w in parts.windows], list(parts.query_ids), ids
        )
        assert score.choice == choice
        assert score.tokens == len(ids)
        assert score.logprob == pytest.approx(expected, abs=1e-3)
        assert score.mean_logprob == pytest.approx(expected / len(ids), abs=1e-3)


def test_the_best_continuation_scores_best() -> None:
    lm = small.lm()
    context = lm.encode_ids([0, 4], [[70, 71, 72], [90, 91]])
    greedy = lm.generate_ids(context, [99, 5], max_new_tokens=1)
    others = [[token] for token in range(20, 40)]
    scores = score_ids(lm._decoder, context, [99, 5], [greedy, *others])
    assert int(torch.tensor(scores).argmax()) == 0


def test_bad_choices_are_refused() -> None:
    with pytest.raises(InputError, match="at least one choice"):
        small.lm().score("Is it?", PASSAGES, [])
    with pytest.raises(InputError, match="Choice 1 has no tokens"):
        small.lm().score("Is it?", PASSAGES, ["yes", ""])
