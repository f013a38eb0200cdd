"""A part of a run, for a machine of several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rag_windows.errors import InputError
from rag_windows.evaluation.example import Example


@dataclass(frozen=True, slots=True)
class Shard:
    """The part ``number`` of ``count``, counted from 1."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise InputError(
                f"There is no part {self.number} of {self.count}; parts are 1/{max(1, self.count)} "
                f"to {max(1, self.count)}/{max(1, self.count)}."
            )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From "2/5".

        Raises:
            InputError: it is something else.
        """
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        if found is None:
            raise InputError(f"{text!r} is no part of a run; write it as 2/5, the second of five.")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def pick(self, examples: Sequence[Example]) -> list[Example]:
        """Those of this part: whole groups, dealt out in the order in which they begin."""
        groups: dict[str, int] = {}
        for example in examples:
            groups.setdefault(example.group, len(groups))
        return [one for one in examples if groups[one.group] % self.count == self.number - 1]
