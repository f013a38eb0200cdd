"""Methods whose windows answer in rows of their own, against whole prompts of the plain model.

`row_logits` has the rows; what the formulas make of them is stated once more here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rag_windows import PCED, MethodError, QueryLikelihood, Sequential
from rag_windows.steps.likelihood import MOST_TOKENS

from . import dense, engine, tolerances, zoo
from .cases import CASES, Case, case, plain
from .float64 import Layer, forward
from .test_ensemble import row_logits
from .test_ensemble_decoding import beams

ARCHITECTURES = ("llama", "qwen3", "gpt2", "gemma3_text-sliding")
FORCED = tuple(zoo.ids(3, 31))
SCORES = (0.3, 1.2, 2.0, 0.9)
LOGITS = (-3.0, 1.5, 0.0, -0.5)
"""Scores of a re-ranker."""

RULES = {
    "released": (PCED(), SCORES),
    "without scores": (PCED(), ()),
    "scores as logits": (PCED(gamma=0.7), LOGITS),
    "fixed contrast": (PCED(beta=0.8, gamma=0), SCORES),
    "no contrast": (PCED(beta=0), SCORES),
}


def decided(logits: Tensor, first: int, rule: PCED, scores: Sequence[float]) -> Tensor:
    """(tokens from the first on, vocabulary): the specification."""
    *experts, amateur = logits[:, first:]
    best = torch.full_like(amateur, -torch.inf)
    for index, own in enumerate(experts):
        beta: Tensor | float = 0.0 if rule.beta is None else rule.beta
        if rule.beta is None:
            p, q = own[0].softmax(-1), amateur[0].softmax(-1)
            m = (p + q) / 2
            beta = (0.5 * p * (p / m).log() + 0.5 * q * (q / m).log()).clamp(0, 1)
        scored = (1 + beta) * own - beta * amateur
        if scores and scores is SCORES:
            scored = (
                scored
                + rule.gamma * torch.tensor(scores[index] / max(scores[: len(experts)])).log()
            )
        elif scores:
            scored = scored + rule.gamma * (scores[index] - max(scores[: len(experts)]))
        best = torch.maximum(best, scored)
    return best.log_softmax(-1)


@pytest.mark.parametrize("ruled", RULES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_experts(name: str, ruled: str) -> None:
    lm, one, (rule, scores) = engine.shared(name), CASES["ragged"], RULES[ruled]
    context = lm.encode_ids(one.prefix, one.windows, method=rule, scores=scores)
    whole, last = row_logits(name, "ragged", FORCED), len(one.query) - 1
    behind = decided(whole, last, rule, scores)
    _, steps = engine.decode(lm, context, one.query, len(FORCED) + 1, [*FORCED, 0])
    assert tolerances.gap(steps, behind) <= 1e-4
    # Asked for every token, the first of them is where the contrast begins.
    asked = decided(whole, 0, rule, scores)[: last + 1]
    assert tolerances.gap(lm.logits(context, one.query), asked) <= 1e-4


@pytest.mark.parametrize("layout", ["no prefix", "long prefix", "one-token query"])
def test_experts_of_other_layouts(layout: str) -> None:
    one = CASES[layout]
    found = engine.logits("llama", one, PCED())
    assert tolerances.gap(found, decided(row_logits("llama", layout, ()), 0, PCED(), ())) <= 1e-4


def test_beams_keep_the_contrast_of_their_first_token() -> None:
    one = CASES["ragged"]
    for tokens, score in beams(one, PCED()):
        whole = row_logits("llama", "ragged", tuple(tokens[:-1]))
        logs = decided(whole, len(one.query) - 1, PCED(), ())
        total = logs.gather(1, torch.tensor(tokens).unsqueeze(1)).sum()
        assert score == pytest.approx(total.item(), abs=1e-4)


CHOICES = {
    "gain": QueryLikelihood(),
    "gain alone": QueryLikelihood(confidence=0.0),
    "likelihood": QueryLikelihood(score="likelihood", confidence=0.0),
    "entropy above all": QueryLikelihood(confidence=100.0),
}


def likeliest(name: str, layout: str, rule: QueryLikelihood | None = None) -> list[int]:
    """Windows in the order that the rule specifies, the best first."""
    rule = rule or QueryLikelihood()
    query = torch.tensor(CASES[layout].query[1:])
    logs = row_logits(name, layout, ()).log_softmax(-1)
    asked = logs[:, :-1].gather(2, query.view(1, -1, 1).expand(len(logs), -1, 1))[..., 0]
    *rows, alone = asked
    scores = torch.stack(rows)
    if rule.score == "gain":
        scores = (scores - alone).clamp(min=0)
    answer = logs[:-1, -1]
    scores = scores.sum(1) + rule.confidence * (answer.exp() * answer).sum(1)
    order: list[int] = scores.argsort(descending=True).tolist()
    return order


def test_the_rules_choose_differently() -> None:
    orders = {tuple(likeliest("llama", "ragged", rule)) for rule in CHOICES.values()}
    assert len(orders) > 2


@pytest.mark.parametrize("layout", ["ragged", "no prefix", "long prefix"])
@pytest.mark.parametrize("chosen", CHOICES)
def test_windows_are_chosen_by_the_rule(chosen: str, layout: str) -> None:
    lm, one, rule = engine.shared("llama"), CASES[layout], CHOICES[chosen]
    context = lm.encode_ids(one.prefix, one.windows, method=replace(rule, retrieve=2))
    found = lm.engine.decoder.for_query(context, one.query).chosen
    assert found == tuple(sorted(likeliest("llama", layout, rule)[:2]))


def looked_at(name: str, layout: str, without: bool) -> torch.Tensor:
    """(windows,) float64: the weights of a query's last two rows in the middle third of layers."""
    one, sliding = CASES[layout], zoo.BY_NAME[name].sliding
    first, end = ASKED
    if without:
        one = replace(one, query=[*one.query[:first], *one.query[end:]])
    row, paid = dense.pack(one.prefix, one.windows, one.query), torch.zeros(len(one.windows))
    paid, layers = paid.double(), len(sliding)

    def mixed(layer: Layer) -> torch.Tensor:
        weights = dense.weights(layer.logits, None, layer.seen, row, dense.PLAIN)
        if layers // 3 <= layer.index < 2 * layers // 3 + 1:
            of_rows = weights[0][:, row.rows][:, -2:].sum(dim=(0, 1))
            for number in range(len(one.windows)):
                paid[number] += of_rows[row.segments == number + 1].sum()
        return dense.mixed(layer, row, dense.PLAIN)

    forward(zoo.shared(name), sliding, row, mixed)
    return paid


ASKED = 1, 3
"""Where the question is in the query."""


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text-sliding"])
@pytest.mark.parametrize("layout", ["ragged", "no prefix", "long prefix"])
def test_attention_counts_as_far_as_the_question_draws_it(name: str, layout: str) -> None:
    lm, one = engine.shared(name), CASES[layout]
    rule = QueryLikelihood(retrieve=1, attention=1e6)
    context = lm.encode_ids(one.prefix, one.windows, method=rule)
    expected = looked_at(name, layout, False) - looked_at(name, layout, True)
    chosen = lm.engine.decoder.for_query(context, one.query, ASKED).chosen
    assert chosen == (int(expected.argmax()),)


def test_no_question_is_left_out_of_a_query_that_is_one() -> None:
    lm, one = engine.shared("llama"), CASES["ragged"]
    rule = QueryLikelihood(retrieve=1, attention=1e6)
    context = lm.encode_ids(one.prefix, one.windows, method=rule)
    whole = 0, len(one.query)
    chosen = lm.engine.decoder.for_query(context, one.query, whole).chosen
    plain = lm.encode_ids(one.prefix, one.windows, method=QueryLikelihood())
    assert chosen == lm.engine.decoder.for_query(plain, one.query, whole).chosen


def test_a_long_query_is_judged_by_its_end() -> None:
    """Each row costs as many tokens, so a conversation is not read whole in all of them."""
    lm, one = engine.shared("llama"), CASES["ragged"]
    long = [*zoo.ids(MOST_TOKENS + 40, 77), *one.query]
    context = lm.encode_ids(one.prefix, one.windows, method=QueryLikelihood(2))
    read = lm.engine.decoder.for_query
    wanted = read(context, long[-MOST_TOKENS:], (MOST_TOKENS - len(one.query), MOST_TOKENS)).chosen
    assert read(context, long, (len(long) - len(one.query), len(long))).chosen == wanted
    assert read(context, long[-MOST_TOKENS:]).chosen == read(context, long).chosen


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("layout", ["ragged", "no prefix", "long prefix"])
def test_the_likeliest_is_read_as_if_it_were_the_only_one(name: str, layout: str) -> None:
    lm, one = engine.shared(name), CASES[layout]
    best = likeliest(name, layout)[0]
    context = lm.encode_ids(one.prefix, one.windows, method=QueryLikelihood())
    chosen = lm.engine.decoder.for_query(context, one.query)
    assert chosen.chosen == (best,)
    tolerances.agree(
        lm.logits(context, one.query), plain(name, Case(one.prefix, [one.windows[best]], one.query))
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("retrieve", [2, 3])
def test_chosen_windows_in_one_prompt(name: str, retrieve: int) -> None:
    """The others are encoded again behind the first, which gives the plain model's prompt."""
    lm, one = engine.shared(name), CASES["ragged"]
    best = likeliest(name, "ragged")[:retrieve]
    method = QueryLikelihood(retrieve, reader=Sequential())
    context = lm.encode_ids(one.prefix, one.windows, method=method)
    whole = plain(name, Case(one.prefix, [one.windows[i] for i in best], one.query))
    tolerances.agree(lm.logits(context, one.query), whole)
    assert lm.engine.decoder.for_query(context, one.query).chosen == tuple(best)


@pytest.mark.parametrize(
    "reader", ["pcw", "ape:temperature=0.7,scale=0.8", "ensemble", "pced", "mateicl"]
)
def test_other_readers_of_the_chosen(reader: str) -> None:
    lm, one = engine.shared("llama"), CASES["ragged"]
    context = engine.encoded("llama", one, f"query-likelihood:retrieve=2+{reader}")
    best = sorted(likeliest("llama", "ragged")[:2])
    fewer = Case(one.prefix, [one.windows[i] for i in best], one.query)
    tolerances.agree(lm.logits(context, one.query), engine.logits("llama", fewer, reader))


def test_retrieval_scores_may_decide() -> None:
    lm, one = engine.shared("llama"), CASES["ragged"]
    worst = likeliest("llama", "ragged")[-1]
    scores = [1.0 if index == worst else 1e-6 for index in range(len(one.windows))]
    method = QueryLikelihood(gamma=100.0)
    context = lm.encode_ids(one.prefix, one.windows, method=method, scores=scores)
    assert lm.engine.decoder.for_query(context, one.query).chosen == (worst,)


@pytest.mark.parametrize(
    "reader", ["linked:tokens=0.5", "structured-prompting", "codebook", "query-likelihood"]
)
def test_readers_that_cannot_follow(reader: str) -> None:
    with pytest.raises(MethodError, match="query-likelihood"):
        engine.encoded("llama", CASES["ragged"], f"query-likelihood+{reader}")


def test_one_window_is_read_without_a_choice() -> None:
    one = case(4, (9,), 5)
    for method in (QueryLikelihood(), QueryLikelihood(2, reader=Sequential()), PCED(beta=0)):
        found = engine.logits("llama", one, method)
        if isinstance(method, PCED):
            found, wanted = found.softmax(-1), plain("llama", one).softmax(-1)
        else:
            wanted = plain("llama", one)
        tolerances.agree(found, wanted)
