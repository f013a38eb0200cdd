"""An ensemble through transformers' own loop: every way of decoding, and small passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rag_windows import PCW, GenerationError, Method, ParallelEnsemble
from rag_windows.steps import ensemble as passes
from rag_windows.steps.ensemble_cache import EnsembleCache

from . import engine, test_ensemble, tolerances, zoo
from .cases import CASES, Case, case, plain
from .test_ensemble import RULES, combined, encoded

SEED = 3


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text-sliding"])
def test_sampling_draws_from_the_combined_distribution(name: str) -> None:
    lm, one, rule = engine.shared(name), CASES["ragged"], RULES["entropy"]
    got = lm.generate_ids(
        encoded(name, one, rule),
        one.query,
        max_new_tokens=4,
        seed=SEED,
        do_sample=True,
        top_k=0,
        temperature=1.3,
    )
    generator = torch.Generator().manual_seed(SEED)
    drawn: list[int] = []
    for _ in range(4):
        logs = combined(name, "ragged", drawn, rule)[-1]
        chances = torch.softmax(logs.float() / 1.3, dim=-1)
        drawn.append(int(torch.multinomial(chances, 1, generator=generator)))
    assert got == drawn


def beams(one: Case, by: Method, scores: Sequence[float] = ()) -> list[tuple[list[int], float]]:
    """Two answers of three tokens by four beams, and their scores, which are sums."""
    options: dict[str, Any] = {
        "max_new_tokens": 3,
        "num_beams": 4,
        "num_return_sequences": 2,
        "do_sample": False,
    }
    options |= {"length_penalty": 0.0, "output_scores": True}
    context = engine.encoded("llama", one, by, scores=scores)
    made = engine.shared("llama").engine.decoder.generate(context, one.query, options=options)
    assert made.sequences[0] != made.sequences[1]
    return list(zip(made.sequences, made.raw.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("ruled", ["retrieval", "nbce"])
def test_beams_add_up_combined_log_probabilities(ruled: str) -> None:
    one, rule = CASES["ragged"], RULES[ruled]
    last = len(one.query) - 1
    for tokens, score in beams(one, rule, test_ensemble.SCORES):
        logs = combined("llama", "ragged", tokens[:-1], rule)[last:]
        total = logs.gather(1, torch.tensor(tokens).unsqueeze(1)).sum()
        assert score == pytest.approx(total.item(), abs=1e-4)


def test_several_queries_at_once() -> None:
    """Rows of one forward pass, right-padded, do not see each other."""
    lm, one, rule = engine.shared("gemma3_text-sliding"), CASES["ragged"], RULES["nbce, nucleus"]
    context = encoded("gemma3_text-sliding", one, rule)
    queries = [one.query, zoo.ids(3, 8), zoo.ids(6, 9)]
    padded = torch.tensor([[*query, *[0] * (6 - len(query))] for query in queries])
    together = lm.engine.decoder.forward(context, padded)
    for row, query in enumerate(queries):
        alone = lm.logits(context, query)
        tolerances.agree(together[row, : len(query)], alone)
    last, alone = lm.engine.decoder.forward(context, padded[:1], last=2), together[0, :6]
    assert last.shape[1] == 2
    assert tolerances.gap(last[0], alone[-2:]) <= tolerances.fp32(alone)


@pytest.mark.parametrize("bounds", [(1, 2**26), (13, 2**26), (8192, 2500)])
def test_small_passes_change_nothing(
    bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, one, rule = engine.shared("gemma3_text-sliding"), CASES["long prefix"], RULES["nbce"]
    context = encoded("gemma3_text-sliding", one, rule)
    whole = lm.logits(context, one.query)
    tokens, steps = engine.decode(lm, context, one.query, 3)
    widest: list[int] = []
    run = EnsembleCache.read

    def counted(cache: EnsembleCache, model: Any, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        widest.append(ids.shape[1])
        return run(cache, model, ids, *more)

    monkeypatch.setattr(EnsembleCache, "read", counted)
    monkeypatch.setattr(passes, "MAX_ROW_TOKENS", bounds[0])
    monkeypatch.setattr(passes, "MAX_LOGITS", bounds[1])
    tolerances.agree(lm.logits(context, one.query), whole)
    assert max(widest) < len(one.query)
    again, small = engine.decode(lm, context, one.query, 3)
    assert again == tokens
    tolerances.agree(small, steps)


def test_no_windows_is_the_plain_model() -> None:
    one = case(9, (), 6)
    rows = engine.logits("llama", one, ParallelEnsemble(weights="retrieval"))
    tolerances.agree(rows, plain("llama", one))


def test_hidden_states_are_refused() -> None:
    lm, one = engine.shared("llama"), CASES["ragged"]
    context = encoded("llama", one, RULES["uniform"])
    with pytest.raises(GenerationError, match=r"output_hidden_states.*ensemble"):
        lm.generate_ids(context, one.query, output_hidden_states=True)


@pytest.mark.parametrize(
    "name", ["gpt_oss", "gemma2", "gemma4_text", "opt", "gpt_bigcode", "mistral-sliding"]
)
def test_other_architectures(name: str) -> None:
    """Equal windows answer alike, so that their ensemble answers as one of them does."""
    one, forced = case(4, (14,), 5), zoo.ids(3, 11)
    twice = Case(one.prefix, one.windows * 2, one.query)
    logs = engine.steps(name, one, PCW(), forced).log_softmax(-1)
    method = ParallelEnsemble(weights="entropy", beta=0)
    tolerances.agree(engine.steps(name, twice, method, forced), logs)
