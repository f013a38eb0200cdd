"""How much of a ranking fits the model's positions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from rag_windows import WindowedLM
from rag_windows.errors import LimitError
from rag_windows.methods import Method
from rag_windows.passage import Passage
from rag_windows.request import Messages, check_limits, in_order


def fitting(
    lm: WindowedLM,
    query: Messages,
    passages: Sequence[Passage],
    method: Method,
    *,
    prefix: str | None,
    max_new_tokens: int,
) -> int:
    """How many passages from the top of a ranking can be read one after the other.

    Of methods that read passages side by side, and where not even the first one fits, it is all of
    them: leaving out those at the end would not help, and the engine says what does.

    Args:
        lm: the model.
        query: the conversation.
        passages: best first.
        method: that reads them.
        prefix: the instruction.
        max_new_tokens: length of the answer at most.

    Raises:
        PromptError: see `Prompt.build`.
    """
    limit = lm.engine.position_limit
    if limit is None or not passages or not in_order(method):
        return len(passages)
    # One tokenization for all the counts that are tried.
    parts = lm.engine.text.prompt.build(query, passages, prefix=prefix)

    def too_many(count: int) -> bool:
        windows = tuple(window for window in parts.windows if window.passage < count)
        try:
            check_limits(replace(parts, windows=windows), passages, method, max_new_tokens, limit)
        except LimitError:
            return True
        return False

    if not too_many(len(passages)):
        return len(passages)
    count = bisect_left(range(len(passages) + 1), True, lo=1, key=too_many) - 1
    some = any(window.passage < count for window in parts.windows)
    return count if some else len(passages)
