"""Which arms a summary has, and what each is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rag_windows.evaluation.data.fields import Place, field, optional, shown

BASE = "sequential"
"""The method that others are compared with, where it was run at the same depth."""


class ArmLike(Protocol):
    """What a summary needs to know of an arm; see `Arm`."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        ...

    @property
    def label(self) -> str:
        """The method."""
        ...

    @property
    def top_k(self) -> int | None:
        """Passages at most."""
        ...


@dataclass(frozen=True, slots=True)
class KnownArm:
    """An arm of a run that was made elsewhere, perhaps with methods that are not known here."""

    name: str
    label: str
    top_k: int | None


def known_arms(settings: Mapping[str, Any], file: str = "manifest.json") -> tuple[KnownArm, ...]:
    """The arms of a manifest's settings, in their order.

    Args:
        settings: with "arms": name to an object with "top_k", a whole number or null.
        file: what to call the manifest in messages.

    Raises:
        DataError: an arm is described otherwise.
    """
    place = Place(file)
    found = []
    for name, arm in field(settings, "arms", dict, place).items():
        depth = optional(arm, "top_k", int, place.at(f"arm {shown(name)}"))
        found.append(KnownArm(name, name.removesuffix(f"@{depth}"), depth))
    return tuple(found)


def base_of(arms: Sequence[ArmLike], place: int) -> int:
    """Place of the arm that one is compared with: sequential at its depth, else the first arm."""
    depth = arms[place].top_k
    alike = (i for i, one in enumerate(arms) if one.label == BASE and one.top_k == depth)
    return next(alike, 0)
