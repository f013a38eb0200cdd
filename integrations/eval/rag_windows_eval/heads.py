"""One weight for each attention head, so that citations by attention follow removals.

After AT2, "Learning to Attribute with Attention" (https://arxiv.org/abs/2504.13752): weights
``theta_lh`` for which ``sum_j v_j sum_lh theta_lh a_lh(j)`` follows the log-probability of the
answer when only the passages ``v`` are read. Here they are not negative, so that masses stay
shares, and drawn towards equal weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from scipy.stats import spearmanr

from rag_windows.calibration import Mean, bootstrap
from rag_windows.errors import DataError
from rag_windows_eval.task import AnswerRecord

Array = npt.NDArray[np.float64]

STRENGTHS = (1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
"""How strongly weights are drawn towards equal ones; the best in cross-validation is taken."""

FOLDS = 5
LEAST = 20
"""Questions that are needed at least."""


@dataclass(frozen=True, slots=True)
class AblatedAnswer:
    """One answer: what its heads looked at, and how likely it is without some passages.

    Attributes:
        heads: (passages, layers x heads).
        drops: (passages,) what it loses without each, in nats.
        left: (halves, passages) bool: which are left.
        logprobs: (halves,) of the answer, in nats.
    """

    heads: Array
    drops: Array
    left: npt.NDArray[np.bool_]
    logprobs: Array

    @classmethod
    def of(cls, record: AnswerRecord) -> AblatedAnswer | None:
        """That of a record; None where nothing can be learned from it."""
        read = [place for place, heads in enumerate(record.heads) if heads]
        if len(read) < 3 or len({one.logprob for one in record.ablations}) < 2:
            return None
        left = [[place not in one.left_out for place in read] for one in record.ablations]
        return cls(
            np.array([record.heads[place] for place in read]),
            np.array([record.passages[place].drop or 0.0 for place in read]),
            np.array(left),
            np.array([one.logprob for one in record.ablations]),
        )

    def lds(self, scores: Array) -> float:
        """Spearman's correlation of the sums of the scores that are left with log-probabilities."""
        sums = self.left @ scores
        if len(set(sums)) < 2:
            return 0.0
        return float(spearmanr(sums, self.logprobs).statistic)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Weights and what they give on questions that they were not fitted on.

    Attributes:
        weights: (layers, heads), with a mean of 1.
        questions: that were used, all of them in turn.
        lds: linear datamodeling scores (https://arxiv.org/abs/2409.00729), from -1 to 1: of equal
            weights, of these, and of removals.
    """

    weights: Array
    questions: int
    lds: dict[str, Mean]


def fit(records: Sequence[AnswerRecord], layers: int, *, seed: int = 0) -> Fitted:
    """Fit weights on all answers; the figures are of weights that one half gave for the other.

    Args:
        records: of one method that reads all passages together.
        layers: of the model.

    Raises:
        DataError: too few of them can be used.
    """
    found = [one for one in map(AblatedAnswer.of, records) if one is not None]
    if len(found) < LEAST:
        raise DataError(
            f"Only {len(found)} answers say what each head looked at, and at least {LEAST} are "
            "needed. Run `rag-windows eval citations --heads` with more questions, with a method "
            "that reads all passages together, such as ape, and with at least 3 passages."
        )
    order = np.random.default_rng(seed).permutation(len(found))
    first, second = ([found[place] for place in half] for half in np.array_split(order, 2))
    rows: dict[str, list[float]] = {"equal weights": [], "fitted weights": [], "removals": []}
    for seen, unseen in ((first, second), (second, first)):
        weights = _solved(seen, _strength(seen))
        for one in unseen:
            rows["equal weights"].append(one.lds(one.heads.sum(axis=1)))
            rows["fitted weights"].append(one.lds(one.heads @ weights))
            rows["removals"].append(one.lds(one.drops))
    means = bootstrap(list(rows.values()), seed)
    weights = _solved(found, _strength(found))
    return Fitted(
        (weights / weights.mean()).reshape(layers, -1),
        len(found),
        dict(zip(rows, means, strict=True)),
    )


def _solved(answers: Sequence[AblatedAnswer], strength: float) -> Array:
    """Weights (layers x heads) of at least 0, by ridge regression towards equal ones."""
    inputs, targets = (
        np.concatenate(parts) for parts in zip(*map(_equations, answers), strict=True)
    )
    sums = inputs.sum(axis=1)
    equal = max(float(sums @ targets) / max(float(sums @ sums), 1e-12), 1e-6)
    scale = np.sqrt(strength * len(inputs)) * float(np.sqrt((inputs**2).mean()) or 1.0)
    size = inputs.shape[1]
    inputs = np.concatenate([inputs, scale * np.eye(size)])
    targets = np.concatenate([targets, np.full(size, scale * equal)])
    weights: Array = nnls(inputs, targets, maxiter=50 * size)[0]
    return weights if weights.any() else np.ones(size)


def _equations(answer: AblatedAnswer) -> tuple[Array, Array]:
    """Sums over what is left and log-probabilities, centred, in units of the latter's spread."""
    inputs, spread = answer.left @ answer.heads, answer.logprobs.std()
    return (inputs - inputs.mean(axis=0)) / spread, (
        answer.logprobs - answer.logprobs.mean()
    ) / spread


def _strength(answers: Sequence[AblatedAnswer]) -> float:
    """The strength that does best on folds that did not fit."""

    def mean(strength: float) -> float:
        found = []
        for fold in range(FOLDS):
            seen = [one for place, one in enumerate(answers) if place % FOLDS != fold]
            weights = _solved(seen, strength)
            found += [one.lds(one.heads @ weights) for one in answers[fold::FOLDS]]
        return float(np.mean(found))

    return max(STRENGTHS, key=mean)
