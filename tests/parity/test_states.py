"""Rows that go on from the model's own cache, against whole prompts of transformers alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from rag_windows import APE, PCED, MethodError, ParallelEnsemble, WindowedLM
from rag_windows.interchange import resolve

from . import engine, states, tolerances, zoo
from .cases import CASES, Case
from .test_rows import SCORES, decided

NAMES = tuple(states.OPTIONS)
FEW = ("qwen3_5_text", "jamba", "mamba2", "gemma3n_text", "deepseek_v3")
FORCED = tuple(zoo.ids(3, 31))
CLOSE = 1e-4


@functools.cache
def prompt(name: str, ids: tuple[int, ...]) -> Tensor:
    """(tokens, vocabulary) logits of a whole prompt, by the plain model."""
    model = states.shared(name).model
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def behind(name: str, one: Case, texts: Sequence[Sequence[int]], forced: Sequence[int]) -> Tensor:
    """(texts, tokens of query and forced, vocabulary): each text behind the prefix."""
    last = [*one.query, *forced]
    rows = [prompt(name, (*one.prefix, *text, *last))[-len(last) :] for text in texts]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "ragged") for name in NAMES), *((name, "no prefix") for name in FEW)],
)
def test_experts(name: str, layout: str) -> None:
    lm, one = states.shared(name), CASES[layout]
    assert lm.method == PCED()
    context = lm.encode_ids(one.prefix, one.windows, scores=SCORES[: len(one.windows)])
    whole = behind(name, one, [*one.windows, ()], FORCED)
    # nemotron_h's own decode steps differ from its prompts by up to 3e-3.
    close = 5e-3 if name == "nemotron_h" else CLOSE
    asked = decided(whole, 0, PCED(), SCORES)[: len(one.query)]
    assert tolerances.gap(lm.logits(context, one.query), asked) <= CLOSE
    steps = decided(whole, len(one.query) - 1, PCED(), SCORES)
    _, found = engine.decode(lm, context, one.query, len(FORCED) + 1, [*FORCED, 0])
    assert tolerances.gap(found, steps) <= close


@pytest.mark.parametrize("name", FEW)
def test_other_ensembles_and_layouts(name: str) -> None:
    lm = states.shared(name)
    for layout, rule in (
        ("long prefix", ParallelEnsemble()),
        ("one-token query", PCED(beta=0)),
        ("ragged", ParallelEnsemble(weights="entropy", beta=0.5, nucleus=1)),
    ):
        one = CASES[layout]
        rows = behind(name, one, one.windows, ()).log_softmax(-1)
        prior = behind(name, one, [()], ()).log_softmax(-1)[0]
        if rule == ParallelEnsemble():
            wanted = rows.mean(0).log_softmax(-1)
        elif isinstance(rule, PCED):
            wanted = behind(name, one, one.windows, ()).amax(0).log_softmax(-1)
        else:
            surety = 1 / (-(rows.exp() * rows).sum(-1)).clamp(min=1e-3)
            weights = surety / surety.sum(0)
            pooled = (weights.unsqueeze(-1) * rows).sum(0).log_softmax(-1)
            wanted = (1.5 * pooled - 0.5 * prior).log_softmax(-1)
        context = lm.encode_ids(one.prefix, one.windows, method=rule)
        assert tolerances.gap(lm.logits(context, one.query), wanted) <= CLOSE


@pytest.mark.parametrize("name", FEW)
def test_one_prompt_and_chosen_passages(name: str) -> None:
    lm, one = states.shared(name), CASES["ragged"]
    every = [token for window in one.windows for token in window]
    whole = behind(name, one, [every], ())[0]
    context = lm.encode_ids(one.prefix, one.windows, method="sequential")
    found = lm.logits(context, one.query).log_softmax(-1)
    assert tolerances.gap(found, whole.log_softmax(-1)) <= CLOSE
    context = lm.encode_ids(one.prefix, one.windows, method="auto")
    chosen = lm.engine.decoder.for_query(context, one.query).chosen
    assert chosen is not None
    assert len(chosen) == 2
    both = [token for index in chosen for token in one.windows[index]]
    found = lm.logits(context, one.query)
    whole = behind(name, one, [both], ())[0].log_softmax(-1)
    assert tolerances.gap(found, whole) <= CLOSE
    by_rows = lm.encode_ids(one.prefix, one.windows, method="query-likelihood:retrieve=2+pced")
    again = lm.engine.decoder.for_query(by_rows, one.query)
    assert again.chosen == tuple(sorted(chosen))
    rows = behind(name, one, [*(one.windows[index] for index in sorted(chosen)), ()], ())
    assert tolerances.gap(lm.logits(by_rows, one.query), decided(rows, 0, PCED(), ())) <= CLOSE


@pytest.mark.parametrize("name", FEW)
def test_neighbours_are_read_by_the_row(name: str) -> None:
    lm, one = states.shared(name), CASES["ragged"]
    before = [zoo.ids(4, 50), [], zoo.ids(9, 51), []][: len(one.windows)]
    before += [[]] * (len(one.windows) - len(before))
    method = "neighbours+pced"
    context = lm.encode_ids(one.prefix, one.windows, method=method, before=before)
    texts = [[*near, *window] for near, window in zip(before, one.windows, strict=True)]
    rows = behind(name, one, [*texts, ()], ())
    assert tolerances.gap(lm.logits(context, one.query), decided(rows, 0, PCED(), ())) <= CLOSE


@pytest.mark.parametrize("name", FEW)
def test_beams_sampling_and_several_answers(name: str) -> None:
    lm, one = states.shared(name), CASES["ragged"]
    context = lm.encode_ids(one.prefix, one.windows)
    beams: dict[str, Any] = {
        "max_new_tokens": 3,
        "num_beams": 4,
        "num_return_sequences": 2,
        "do_sample": False,
        "length_penalty": 0.0,
        "output_scores": True,
    }
    made = lm.engine.decoder.generate(context, one.query, options=beams)
    assert made.sequences[0] != made.sequences[1]
    for tokens, score in zip(made.sequences, made.raw.sequences_scores.tolist(), strict=True):
        whole = behind(name, one, [*one.windows, ()], tokens[:-1])
        logs = decided(whole, len(one.query) - 1, PCED(), ())
        total = logs.gather(1, torch.tensor(tokens).unsqueeze(1)).sum()
        assert score == pytest.approx(total.item(), abs=CLOSE)
    sampled = {"do_sample": True, "top_k": 0, "temperature": 1.3, "num_return_sequences": 3}
    drawn = lm.engine.decoder.generate(
        context, one.query, options={**sampled, "max_new_tokens": 4}, seed=3
    )
    assert len(drawn.sequences) == 3
    assert len({tuple(ids) for ids in drawn.sequences}) > 1


@pytest.mark.parametrize("name", FEW)
def test_threads_and_other_rows_change_nothing(name: str) -> None:
    lm = states.shared(name)
    cases = [CASES[layout] for layout in ("ragged", "no prefix", "long prefix")] * 3

    def answer(one: Case) -> tuple[Tensor, list[int]]:
        torch.set_num_threads(1)
        context = lm.encode_ids(one.prefix, one.windows)
        return lm.logits(context, one.query), lm.generate_ids(context, one.query, max_new_tokens=4)

    alone = [answer(one) for one in cases[:3]] * 3
    with ThreadPoolExecutor(4) as pool:
        for (logits, ids), (wanted, same) in zip(pool.map(answer, cases), alone, strict=True):
            assert tolerances.gap(logits, wanted) <= CLOSE
            assert ids == same


@pytest.mark.parametrize("name", FEW)
def test_low_precision(name: str) -> None:
    model = states.build(name, dtype=torch.bfloat16)
    lm, one = WindowedLM.from_pretrained(model, tokenizer=None), CASES["ragged"]
    found = lm.logits(lm.encode_ids(one.prefix, one.windows), one.query)
    exact = decided(behind(name, one, [*one.windows, ()], ()), 0, PCED(), ())
    with torch.no_grad():
        rows = torch.stack(
            [
                model(torch.tensor([[*one.prefix, *text, *one.query]])).logits[0, -len(one.query) :]
                for text in [*one.windows, ()]
            ]
        )
    own = decided(rows.float(), 0, PCED(), ())
    limit = tolerances.BF16_FACTOR * tolerances.rms(own, exact)
    assert tolerances.rms(found, exact) <= limit


@pytest.mark.parametrize("name", NAMES)
def test_each_loads_in_the_dtype_that_people_use(name: str) -> None:
    lm = WindowedLM.from_pretrained(states.build(name, 1, torch.bfloat16), tokenizer=None)
    form = lm.engine.plain_encoder.form
    assert form is not None
    assert form.continues == (name not in states.BY_TOKEN)


@pytest.mark.parametrize(
    "method",
    ["ape", "pcw", "structured-prompting", "mateicl", "linked", "codebook", "sink", "neighbours"],
)
def test_methods_with_one_attention_are_refused_by_name(method: str) -> None:
    lm, one = states.shared("qwen3_5_text"), CASES["ragged"]
    with pytest.raises(MethodError, match=r"linear_attention.* Use method='pced'"):
        lm.encode_ids(one.prefix, one.windows, method=method)
    with pytest.raises(MethodError, match=f"{resolve(method).name}"):
        WindowedLM.from_pretrained(lm.model, tokenizer=None, method=resolve(method))
    assert lm.engine.reading_all(None) == PCED()


def test_a_context_of_another_model_is_refused() -> None:
    one = CASES["ragged"]
    other = states.shared("mamba2").encode_ids(one.prefix, one.windows)
    with pytest.raises(Exception, match="encoded by another model"):
        states.shared("qwen3_5_text").logits(other, one.query)
    dense = engine.shared("llama").encode_ids(one.prefix, one.windows, method=APE())
    with pytest.raises(Exception, match="encoded by another model"):
        states.shared("qwen3_5_text").logits(dense, one.query)
