"""Ensembles: every window's own answer is computed once, and combined by each set of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.judgement.cases import Group, Question
from benchmarks.judgement.reading import Prepared, Reader, Reading, judged, rows_of
from rag_windows import Passage
from rag_windows.methods import Method
from rag_windows.methods.pooling import Pooling
from rag_windows.steps.ensemble import taken_passes
from rag_windows_retrievers import BM25Retriever

AT_ONCE = 2
"""Questions that share a pass; each has a row a window."""


def read_ensembles(
    reader: Reader, prepared: Prepared, methods: Sequence[Method]
) -> list[list[Reading]]:
    """Answer a context's questions by ensembles that differ in their weights only.

    Returns:
        Per method, a reading a question.
    """
    combinations = [method.combination for method in methods if method.combination is not None]
    # One that asks without any window, too, has the rows of those that don't.
    base = next((m for m, c in zip(methods, combinations, strict=True) if c.prior), methods[0])
    scores = bm25(prepared.texts, prepared.texts.questions)
    context = reader.encode(prepared, base, scores[0])
    # Questions of like length together: then few rows behind a question are computed in vain.
    order = sorted(range(len(scores)), key=lambda number: len(prepared.asked[number].query_ids))
    found: list[dict[int, Reading]] = [{} for _ in methods]
    for start in range(0, len(order), AT_ONCE):
        numbers = order[start : start + AT_ONCE]
        asked = [prepared.asked[number] for number in numbers]
        ids, first = rows_of(asked)
        with taken_passes() as passes:
            reader.lm.engine.decoder.forward(context, ids, last=ids.shape[1] - first)
        logprobs = torch.cat([one.logprobs for one in passes], dim=2)
        priors = [one.prior for one in passes if one.prior is not None]
        prior = torch.cat(priors, dim=1) if priors else None
        for readings, combination in zip(found, combinations, strict=True):
            chosen = [
                _chosen(combination, logprobs, prior, row, scores[number])
                for row, number in enumerate(numbers)
            ]
            readings.update(zip(numbers, judged(chosen, asked, first), strict=True))
    return [[readings[number] for number in range(len(scores))] for readings in found]


def _chosen(
    combination: Pooling,
    logprobs: torch.Tensor,
    prior: torch.Tensor | None,
    row: int,
    scores: Sequence[float],
) -> list[int]:
    """The most likely tokens behind one question's tokens."""
    own = logprobs[row : row + 1]
    weights = combination.weigh(own, combination.fixed(scores, range(own.shape[1])))
    without = None if prior is None else prior[row : row + 1]
    return combination.combine(own, weights, without)[0].argmax(dim=-1).tolist()


def bm25(group: Group, questions: Sequence[Question]) -> list[list[float]]:
    """BM25 scores of a context's passages, a list a question; 0 where no word is shared.

    The query is what the user said in the whole conversation: a follow-up's last question holds a
    pronoun where the name was.
    """
    numbered = [replace(passage, id=str(number)) for number, passage in enumerate(group.passages)]
    retriever = BM25Retriever(numbered)
    scores = []
    for question in questions:
        said = " ".join(m["content"] for m in question.messages if m["role"] == "user")
        own = [0.0] * len(numbered)
        for found in retriever.retrieve(said, k=len(numbered)):
            own[int(found.id or 0)] = found.score or 0.0
        scores.append(own)
    return scores


def scored(group: Group, question: Question) -> tuple[Passage, ...]:
    """The passages with their scores for one question."""
    return tuple(
        replace(passage, score=score)
        for passage, score in zip(group.passages, bm25(group, [question])[0], strict=True)
    )
