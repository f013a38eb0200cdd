"""BLEU of a whole set of answers."""

from __future__ import annotations

from collections.abc import Sequence

from rag_windows.evaluation.scores.packages import check_packages
from rag_windows.evaluation.task import Score


def bleu_score(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """SacreBLEU (Post, WMT 2018) with its defaults: 13a tokens, 4-grams, exponential smoothing.

    Args:
        answers: one an example.
        references: at least one an example; their number may differ.

    Returns:
        "bleu" in percent, NaN without examples; with parts, since it is no mean over examples.

    Raises:
        MissingExtraError: sacrebleu or numpy is not installed.
    """
    check_packages("sacrebleu", "numpy")
    from sacrebleu.metrics.bleu import BLEU

    from rag_windows.evaluation.statistics.bleu import bleu, bleu_row
    from rag_windows.evaluation.statistics.parts import Parts

    # `force` only keeps it from asking on stderr whether the text was tokenized before.
    metric = BLEU(force=True)
    found = [
        metric.corpus_score([answer], [[one] for one in right])
        for answer, right in zip(answers, references, strict=True)
    ]
    value = float("nan")
    if found:
        # BLEU of all is that of the sums over the sentences, each with its own references.
        value = BLEU.compute_bleu(
            [sum(counts) for counts in zip(*(one.counts for one in found), strict=True)],
            [sum(totals) for totals in zip(*(one.totals for one in found), strict=True)],
            sum(one.sys_len for one in found),
            sum(one.ref_len for one in found),
            smooth_method=metric.smooth_method,
        ).score
    parts = Parts(tuple(bleu_row(one) for one in found), bleu)
    return Score("bleu", float(value), (None,) * len(answers), parts)
