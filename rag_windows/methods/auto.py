"""The method that follows what the passages say of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_windows.methods.neighbours import Neighbours


@dataclass(frozen=True, slots=True)
class Auto(Neighbours):
    """Chooses by the passages: one prompt for few short ones, neighbours for chunks, else windows.

    It looks at what costs nothing to see, and a note of the answer says what it chose:

    - Few short passages (`Guard` with its defaults) are read in one prompt, as ``fallback=`` does
      it; another ``fallback`` given beside this method stands in for that.
    - Passages with ``before`` are encoded in sight of those neighbours; see `Neighbours`.
    - All others are windows by themselves.

    The reader is ``pcw``, or the method of a calibration profile that the model was loaded with.
    Windows are those of ``neighbours`` with the same reader, in a cache as well.
    """

    name: ClassVar[str] = "auto"
    formula: ClassVar[str] = "sequential, neighbours or the reader alone"
    paper: ClassVar[str] = "-"

    def __post_init__(self) -> None:
        Neighbours.__post_init__(self)
        if self.reader.neighbours:
            self.refuse("it looks for neighbours itself. Use ape or pcw as the reader.")
