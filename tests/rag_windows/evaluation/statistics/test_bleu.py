from __future__ import annotations

import random

import numpy as np
import pytest

from rag_windows.evaluation.statistics.bleu import bleu, bleu_row

sacrebleu = pytest.importorskip("sacrebleu")

WORDS = "a ferry crosses the grey sound at noon , and nobody waits .".split()


def sentences(seed: int, longest: int, count: int = 30) -> tuple[list[str], list[list[str]]]:
    rng = random.Random(seed)

    def one() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(0, longest)))

    return [one() for _ in range(count)], [[one(), one()] for _ in range(count)]


def rows(answers: list[str], references: list[list[str]]) -> np.ndarray:
    metric = sacrebleu.BLEU(force=True)
    return np.array(
        [
            bleu_row(metric.corpus_score([answer], [[one] for one in right]))
            for answer, right in zip(answers, references, strict=True)
        ]
    )


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 25])
def test_sums_of_any_sentences_give_sacrebleus_figure(longest: int) -> None:
    answers, references = sentences(longest, longest)
    found = rows(answers, references)
    rng = np.random.default_rng(0)
    metric = sacrebleu.BLEU(force=True)
    for size in (1, 2, 5, 30):
        chosen = rng.integers(len(answers), size=size)
        streams = [[references[i][one] for i in chosen] for one in (0, 1)]
        wanted = metric.corpus_score([answers[i] for i in chosen], streams).score
        assert float(bleu(found[chosen].sum(axis=0))) == pytest.approx(wanted, rel=1e-12, abs=0)


def test_many_draws_at_once_and_nothing_at_all() -> None:
    found = rows(*sentences(1, 20))
    sums = np.stack([found.sum(axis=0), np.zeros(10), found[:10].sum(axis=0)])
    several = bleu(sums.reshape(3, 1, 10))
    assert several.shape == (3, 1)
    assert several[1, 0] == 0
    assert several[2, 0] == bleu(sums[2])
