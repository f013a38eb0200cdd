"""Which passages carried an answer, by the attention they got."""

from __future__ import annotations

from collections.abc import Iterable

from rag_windows.generation import Citation

SHARE_OF_STRONGEST = 0.5
"""A passage is cited with at least this share of the strongest passage's attention mass."""

_ROUNDING = 1e-6
"""Equal masses differ by rounding; none of them is left out for that."""


def carried(citations: Iterable[Citation] | None) -> tuple[Citation, ...]:
    """The passages that carried an answer.

    A passage did if its attention mass is at least `SHARE_OF_STRONGEST` of the strongest passage's,
    and not below the mean of the passages read. The rule is ours: it names one passage where one
    stands out, several where they share the attention, and all of them where the attention tells
    them not apart. It is evidence of what the model looked at, no proof of what the answer is
    based on.

    Args:
        citations: of a `Generation`; None where they were switched off.

    Returns:
        Strongest first; empty if no passage was read.
    """
    read = [citation for citation in citations or () if citation.mass > 0]
    if not read:
        return ()
    strongest = max(citation.mass for citation in read)
    mean = sum(citation.mass for citation in read) / len(read)
    least = max(SHARE_OF_STRONGEST * strongest, mean) * (1 - _ROUNDING)
    return tuple(sorted((c for c in read if c.mass >= least), key=lambda c: (-c.mass, c.passage)))
