"""Sections of the report beside the table of ways: methods, and many questions."""

from __future__ import annotations

from collections.abc import Sequence

from rag_windows.benchmark.crowd import ALONE
from rag_windows.benchmark.result import Crowd, Reading, Step, median
from rag_windows.benchmark.words import number, spread, table, times

_PLAIN = "pcw"


def readings(found: Sequence[Reading]) -> list[str]:
    """What each method costs at a token, beside plain windows, else beside the last method."""
    if not found:
        return []
    base = next((one for one in found if one.method == _PLAIN), found[-1])
    rows = []
    for one in found:
        beside = slowdown(one, base)
        rows.append(
            [
                one.method,
                spread(one.first_s, "s"),
                spread([1000 * each for each in one.token_s], "ms"),
                ""
                if one is base
                else f"{median(beside):+.1f}% ({min(beside):+.1f}% to {max(beside):+.1f}%)",
            ]
        )
    return [
        "",
        f"Methods over these windows in memory, a token of each in turn, {len(base.first_s)} "
        f"rounds of {base.tokens} tokens, passes of the model alone; the time of a further token "
        "is the median over a round's, and the last column compares within each round.",
        "",
        *table(["method", "first token", "a further token", f"more than {base.method}"], rows),
    ]


def slowdown(one: Reading, base: Reading) -> list[float]:
    """By how many percent a method takes longer for a token, in each round."""
    pairs = zip(one.token_s, base.token_s, strict=True)
    return [100 * (own / other - 1) for own, other in pairs]


def steps(found: Sequence[Step]) -> list[str]:
    """Where the time of a further token goes."""
    if not found:
        return []
    rows = []
    for one in found:
        parts = (one.linear, one.windows, one.tail, one.rest)
        rows.append([f"{number(part)} ms" for part in (*parts, one.total)])
    return [
        "",
        "A further token over windows in memory, taken apart (the quickest of three rounds, under "
        "a profiler, which makes all else look dearer than it is):",
        "",
        *table(
            [
                "linear layers",
                "attention over windows",
                "over prefix, question and answer",
                "all else",
                "together",
            ],
            rows,
        ),
    ]


def crowds(found: Sequence[Crowd]) -> list[str]:
    """Throughput of many questions."""
    if not found:
        return []
    rows = []
    for crowd in found:
        alone = next(
            (
                one.seconds
                for one in found
                if (one.questions, one.context) == (crowd.questions, crowd.context)
                and one.way == ALONE
            ),
            [],
        )
        made = crowd.questions * crowd.tokens
        rows.append(
            [
                f"{crowd.questions}",
                f"{crowd.context:,}",
                crowd.way,
                spread(crowd.seconds, "s"),
                f"{number(made / median(crowd.seconds))} /s",
                times(alone, crowd.seconds),
            ]
        )
    return [
        "",
        "### Many questions that share half of their passages",
        "",
        f"{found[0].tokens} new tokens for each; their windows are in memory.",
        "",
        *table(
            ["questions", "tokens of each", "way", "seconds for all", "tokens", "throughput"],
            rows,
        ),
    ]
