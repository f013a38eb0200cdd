"""What a question costs: `WindowedLM.generate` encodes and answers, and nothing is kept."""

from __future__ import annotations

import itertools

from benchmarks.judgement.cases import Group, draw_groups
from benchmarks.judgement.ensembles import read_ensembles, scored
from benchmarks.judgement.journal import Cost
from benchmarks.judgement.reading import Prepared, Reader, Reading
from benchmarks.judgement.work import Work
from rag_windows.methods import Method

MOST_TOKENS = 16
"""Greater than any right answer."""


def measure(reader: Reader, work: Work) -> list[Cost]:
    """Answer ``work.questions`` questions, each on a context of its own, by every method.

    The methods take turns on each question, so that a noisy machine treats them alike. Another
    question before them warms everything up.
    """
    groups = itertools.islice(
        draw_groups(work.task, work.passages, 10**9, work.seed), work.questions + 1
    )
    seconds: dict[str, list[tuple[float, float]]] = {label: [] for label, _ in work.methods}
    agreed = dict.fromkeys(seconds, 0)
    for number, group in enumerate(groups):
        question = group.questions[0]
        passages = scored(group, question)
        alone = reader.prepare(Group(passages, (question,)))
        for label, method in work.methods:
            generation = reader.lm.generate(
                list(question.messages),
                passages,
                method=method,
                max_new_tokens=MOST_TOKENS,
                do_sample=False,
                citations=False,
            )
            if not number:
                continue
            times = generation.timings
            seconds[label].append((times.encode_s, times.total_s - times.encode_s))
            right = generation.text.strip() == question.answer
            agreed[label] += right == read_one(reader, alone, method).right
    return [
        Cost(
            model=work.model,
            passages=work.passages,
            label=label,
            method=repr(method),
            encode_s=tuple(encode for encode, _ in seconds[label]),
            answer_s=tuple(answer for _, answer in seconds[label]),
            agreed=agreed[label],
        )
        for label, method in work.methods
    ]


def read_one(reader: Reader, prepared: Prepared, method: Method) -> Reading:
    """The answer to a context's only question, by one pass over the right one."""
    if method.combination is not None:
        return read_ensembles(reader, prepared, [method])[0][0]
    return reader.read(reader.encode(prepared, method), prepared)[0]
