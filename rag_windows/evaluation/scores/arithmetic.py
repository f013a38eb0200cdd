"""Whether an answer holds a number or the formula that gives it: ConvFinQA's metric."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LEFT_OUT = str.maketrans("", "", ",$")
_REMARK = re.compile(r"\(\w+\)")


def holds_result(answer: str, question: str, result: float | str, formula: str) -> bool:
    """Whether an answer is right for ChatRAG-Bench's ConvFinQA.

    Readers answer at length, so it is enough that the answer contains the result or its formula as
    text, once commas, dollar signs, "million", "billion" and single words in parentheses are taken
    out of it. A result also counts rounded to three or two decimals; times 100, in full and rounded
    to one or two decimals, if the question holds "percent"; without ".0"; and without its minus if
    the answer speaks of a decrease. A blank result or formula is found in nothing.

    Args:
        answer: what the reader wrote.
        question: the last one.
        result: as the dataset's ``exe_answer`` holds it, mostly a number, sometimes "yes" or "no".
        formula: the dataset's first answer.
    """
    text = answer.translate(_LEFT_OUT).replace("million", "").replace("billion", "")
    text = " ".join(_REMARK.sub("", text).split())
    wanted = (str(result), formula, *_written(result, "percent" in question, "decrease" in text))
    return any(one.strip() and one in text for one in wanted)


def _written(result: float | str, percent: bool, decrease: bool) -> Iterator[str]:
    """Other ways to write a result that is a number."""
    try:
        number = float(result)
    except (ValueError, OverflowError):
        return
    yield str(round(number, 3))
    yield str(round(number, 2))
    if percent:
        yield str(number * 100)
        yield str(round(number * 100, 1))
        yield str(round(number * 100, 2))
    if str(result).endswith(".0"):
        yield str(int(number))
    if decrease and number < 0:
        yield str(-number if isinstance(result, str) else -result)
