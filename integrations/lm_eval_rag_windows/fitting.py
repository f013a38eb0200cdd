"""What is done with prompts that are longer than the model's positions."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lm_eval_rag_windows.tokens import Cut, Ids
from rag_windows.errors import LimitError
from rag_windows.methods import Method, window_starts
from rag_windows.request import in_order
from rag_windows.steps.refinement import check_room

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Fitting:
    """Makes prompts fit, and counts what that took.

    A window that is longer than it may be becomes several. What is too long then, loses tokens from
    its left end, as with the harness's own models: the question where there are windows, the whole
    prompt where there are none or they are read one after the other. Each time a warning is logged.

    Attributes:
        method: how windows are read.
        limit: positions that may be used.
        window: tokens that a window may hold.
        split: windows that were cut into several.
        truncated: prompts that lost tokens.
    """

    method: Method
    limit: int
    window: int
    split: int = 0
    truncated: int = 0

    def fit(self, cut: Cut, more: int, name: str) -> Cut:
        """A prompt that leaves room for ``more`` tokens.

        Raises:
            LimitError: there is no way; the message names the request.
        """
        windows: list[Ids] = []
        one_after_another = in_order(self.method)
        for ids in cut.windows:
            size = len(ids) if one_after_another else self.window
            parts = [ids[i : i + size] for i in range(0, len(ids), size)]
            self.split += len(parts) > 1
            windows += parts
        used = sum(map(len, windows)) if one_after_another else max(map(len, windows), default=0)
        over = len(cut.prefix) + used + len(cut.question) + more - self.limit
        cut = Cut(cut.prefix, tuple(windows), cut.question)
        if over > 0:
            cut = self._truncated(cut, over, more, name)
        self._check_refinement(cut, name)
        return cut

    def _truncated(self, cut: Cut, over: int, more: int, name: str) -> Cut:
        whole = not cut.windows or not self.method.windowed
        ids = (
            (*cut.prefix, *(i for window in cut.windows for i in window), *cut.question)
            if whole
            else cut.question
        )
        if over >= len(ids):
            raise LimitError(
                f"{name} does not fit the {self.limit} positions that may be used: {over} tokens "
                f"too many, with {len(cut.question)} of the question and {more} behind it. Set "
                "max_window_tokens lower, give fewer examples, or raise max_length if the model "
                "can."
            )
        self.truncated += 1
        _log.warning(
            "%s is longer than %d positions; it loses %d tokens from the left of %s.",
            name,
            self.limit,
            over,
            "the prompt" if whole else "its question",
        )
        return Cut((), (), ids[over:]) if whole else Cut(cut.prefix, cut.windows, ids[over:])

    def _check_refinement(self, cut: Cut, name: str) -> None:
        """Refuse windows whose further passes would stand beyond the model's positions."""
        refinement = self.method.refinement
        if refinement is None or not cut.windows:
            return
        prefix, lengths = len(cut.prefix), [len(ids) for ids in cut.windows]
        starts = window_starts(self.method.alignment, prefix, lengths)
        if not self.method.windowed:
            starts, lengths = [prefix], [sum(lengths)]
        check_room(
            refinement,
            starts,
            lengths,
            self.limit,
            lambda index: f"Window {index} of {name}",
            "set max_window_tokens={} or less",
        )
