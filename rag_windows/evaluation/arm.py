"""A method with the number of passages that it reads: one of the things that a run compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_windows.errors import InputError
from rag_windows.methods import Method


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of a comparison.

    Attributes:
        label: the method as it was named by the user, such as "deep-thinking+ape".
        method: itself.
        top_k: how many passages it reads at most; None for all that an example brings.
    """

    label: str
    method: Method
    top_k: int | None = None

    @property
    def name(self) -> str:
        """Unique in a run, such as "ape@20"."""
        return self.label if self.top_k is None else f"{self.label}@{self.top_k}"


def arms(methods: Sequence[tuple[str, Method]], depths: Sequence[int | None]) -> tuple[Arm, ...]:
    """Each method at each depth, in this order.

    Raises:
        InputError: there is none, or one of them twice.
    """
    made = tuple(Arm(label, method, depth) for depth in depths for label, method in methods)
    if not made:
        raise InputError("Nothing to compare: name at least one method and one number of passages.")
    names = [one.name for one in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice} stands twice among what is compared; name it once.")
    return made
