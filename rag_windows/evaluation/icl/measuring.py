"""How long a task's texts and choices are, as a model's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from rag_windows.errors import InputError
from rag_windows.evaluation.icl.item import Item
from rag_windows.icl.classifier import labels_for
from rag_windows.icl.demonstrations import Labels

if TYPE_CHECKING:
    from rag_windows.evaluation.icl.task import IclTask
    from rag_windows.model import WindowedLM


class Measured:
    """A task in a model's tokens.

    Args:
        task: its texts and choices.
        lm: the model.
    """

    def __init__(self, task: IclTask, lm: WindowedLM) -> None:
        self.lm = lm
        self._task = task
        self._labels: dict[tuple[str, ...], Labels] = {}

    def labels(self, item: Item) -> Labels:
        """The item's choices.

        Raises:
            InputError: two of them are the same tokens.
        """
        choices = self._task.choices_of(item)
        if choices not in self._labels:
            self._labels[choices] = labels_for(self.lm.engine, self._task.template, choices)
        return self._labels[choices]

    def apart(self, item: Item) -> bool:
        """Whether an item gets windows of its own size.

        It does if it takes more than half of the model's positions, so that one overlong text makes
        nobody else's windows short; or if its choices can't be used, which is told of it alone.
        """
        size, limit = self._sizes[item.key], self.lm.engine.position_limit
        return size is None or (limit is not None and size > limit // 2)

    @cached_property
    def usual(self) -> tuple[str, list[Labels]]:
        """The longest text of those that share windows, and all their choices; "" for none."""
        items = [one for one in self._task.asked.values() if not self.apart(one)]
        longest = max(items, key=lambda one: self._sizes[one.key] or 0, default=None)
        if longest is None:
            return "", []
        return self._task.text_of(longest), list({self.labels(one): None for one in items})

    @cached_property
    def _sizes(self) -> Mapping[str, int | None]:
        """Tokens of each item's text; None where its choices can't be used."""
        encode = self.lm.engine.text.prompt.encode_text
        sizes: dict[str, int | None] = {}
        for item in self._task.asked.values():
            try:
                longest = max(map(len, self.labels(item).ids))
            except InputError:
                sizes[item.key] = None
                continue
            sizes[item.key] = len(encode(self._task.text_of(item), continuation=True)) + longest
        return sizes
