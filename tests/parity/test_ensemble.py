"""The ensemble against the explicit product of its windows' distributions, in float64.

Each window is read by the plain model, alone: one dense prompt [prefix | window | query], the query
where it stands in the ensemble, behind the longest window. What the formulas make of these
distributions is stated once more here, independently of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from rag_windows import ParallelEnsemble

from . import dense, engine, tolerances, zoo
from .cases import CASES

ARCHITECTURES = ("llama", "qwen3", "gpt2", "gemma3_text-sliding")
FORCED = tuple(zoo.ids(2, 31))
SCORES = (0.3, -1.2, 2.0, 0.9)


# Their numbers are read in `combined`, their formulas are not; nucleus=1 corrects every token.
RULES: Mapping[str, ParallelEnsemble] = {
    "uniform": ParallelEnsemble(),
    "uniform, prior": ParallelEnsemble(beta=0.5, nucleus=1),
    "retrieval": ParallelEnsemble("retrieval", score_temperature=0.7),
    "entropy": ParallelEnsemble("entropy", beta=0),
    "minimum": ParallelEnsemble("entropy", "minimum", beta=0),
    "nbce": ParallelEnsemble("entropy", "minimum", nucleus=1),
    "nbce, nucleus": ParallelEnsemble("entropy", "minimum", nucleus=0.8),
    "inverse, nucleus": ParallelEnsemble("entropy", beta=1.5),
}


@cache
def row_logits(name: str, layout: str, answer: tuple[int, ...]) -> Tensor:
    """(windows + 1, tokens, vocabulary) logits in float64: of each window alone, then without any.

    The query stands behind the longest window in each of them.
    """
    one, entry, made = CASES[layout], zoo.BY_NAME[name], []
    for window in [*one.windows, []]:
        packed = dense.pack(one.prefix, [window] if window else [], [*one.query, *answer])
        further = max(map(len, one.windows)) - len(window)
        packed = replace(packed, positions=packed.positions + further * packed.rows)
        made.append(
            dense.masked_logits(zoo.shared(name), entry.sliding, packed, entry.mask_by_type)
        )
    return torch.stack(made).double()


def rows(name: str, layout: str, answer: tuple[int, ...]) -> Tensor:
    """The same as log-probabilities."""
    return row_logits(name, layout, answer).log_softmax(-1)


def combined(name: str, layout: str, answer: Sequence[int], rule: ParallelEnsemble) -> Tensor:
    """(tokens of query and answer, vocabulary): the specification."""
    *each, prior = rows(name, layout, tuple(answer))
    logs = torch.stack(each)
    count = len(logs)
    if rule.weights == "uniform":
        weights = torch.full(logs.shape[:2], 1 / count, dtype=torch.float64)
    elif rule.weights == "retrieval":
        scores = torch.tensor(SCORES[:count], dtype=torch.float64)
        weights = torch.softmax(scores / rule.score_temperature, 0)[:, None].expand(logs.shape[:2])
    else:
        entropy = torch.distributions.Categorical(logits=logs).entropy()
        if rule.pooling == "inverse":
            weights = (1 / entropy) / (1 / entropy).sum(0)
        else:
            weights = torch.nn.functional.one_hot(entropy.argmin(0), count).T.double()
    product = torch.zeros_like(logs[0])
    for weight, log in zip(weights, logs, strict=True):
        product += weight[:, None] * log
    product = product.log_softmax(-1)
    default = 0.25 if rule.weights == "entropy" else 0.0
    beta = default if rule.beta is None else rule.beta
    if not beta:
        return product
    corrected = (1 + beta) * product - beta * prior
    both = nucleus(product, rule.nucleus) & nucleus(prior, rule.nucleus)
    return torch.where(both, corrected, product).log_softmax(-1)


def nucleus(logs: Tensor, share: float) -> Tensor:
    """The most probable tokens, as few as hold the share."""
    if share == 1:
        return torch.ones_like(logs, dtype=torch.bool)
    inside = torch.zeros_like(logs, dtype=torch.bool)
    for kept, line in zip(inside, logs, strict=True):
        total = 0.0
        for token in line.argsort(descending=True).tolist():
            kept[token] = True
            total += math.exp(line[token].item())
            if total >= share:
                break
    return inside


encoded = partial(engine.encoded, scores=SCORES)


@pytest.mark.parametrize(
    ("name", "ruled"),
    [
        (name, ruled)
        for name in ARCHITECTURES
        for ruled in RULES
        if name == "llama" or ruled in ("uniform", "retrieval", "nbce", "inverse, nucleus")
    ],
)
def test_prefill_and_steps(name: str, ruled: str) -> None:
    lm, one, rule = engine.shared(name), CASES["ragged"], RULES[ruled]
    context = encoded(name, one, rule)
    reference = combined(name, "ragged", FORCED, rule)
    bound, last = tolerances.fp32(reference), len(one.query) - 1
    _, steps = engine.decode(lm, context, one.query, len(FORCED) + 1, [*FORCED, 0])
    assert tolerances.gap(lm.logits(context, one.query), reference[: last + 1]) <= bound
    assert tolerances.gap(steps, reference[last:]) <= bound


@pytest.mark.parametrize("ruled", ["uniform", "nbce, nucleus"])
def test_greedy_takes_the_most_likely_token(ruled: str) -> None:
    lm, one, rule = engine.shared("llama"), CASES["ragged"], RULES[ruled]
    tokens = lm.generate_ids(encoded("llama", one, rule), one.query, max_new_tokens=3)
    reference = combined("llama", "ragged", tokens[:-1], rule)[len(one.query) - 1 :]
    assert tokens == reference.argmax(-1).tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("layout", ["no prefix", "long prefix", "one-token query"])
def test_layouts(name: str, layout: str) -> None:
    lm, one, rule = engine.shared(name), CASES[layout], RULES["inverse, nucleus"]
    reference = combined(name, layout, (), rule)
    tolerances.agree(lm.logits(encoded(name, one, rule), one.query), reference)
