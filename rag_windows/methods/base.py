"""What a method is: what it changes about encoding the windows and about reading them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

from rag_windows.errors import MethodError

if TYPE_CHECKING:
    from rag_windows.methods.codebook import Codebook
    from rag_windows.methods.combination import Combination
    from rag_windows.methods.deep_thinking import DeepThinking
    from rag_windows.methods.linked import Linked
    from rag_windows.methods.query_likelihood import QueryLikelihood

Alignment = Literal["left", "right", "in order"] | int
"""Where windows stand: all begin behind the prefix, or all end where the longest of them ends, or
each begins where the one before it ends. A number n: each ends at the next multiple of n tokens
behind the prefix."""


def stands_by_itself(alignment: Alignment) -> bool:
    """Whether a window's position depends on no other window of its request."""
    return alignment == "left" or isinstance(alignment, int)


def window_starts(
    alignment: Alignment, first: int, lengths: Sequence[int], before: Sequence[int] = ()
) -> list[int]:
    """Position of the first token of windows of these lengths behind ``first`` tokens of prefix.

    Directly in front of it stand as many tokens as ``before`` says (none where it is empty), which
    the window sees while it is encoded. Windows in order have no space for them: they then share
    positions with the window before, or with the end of the prefix.
    """
    if alignment == "in order":
        return list(accumulate(lengths[:-1], initial=first)) if lengths else []
    before = before or [0] * len(lengths)
    if alignment == "left":
        return [first + seen for seen in before]
    needed = [*map(sum, zip(lengths, before, strict=True))]
    if isinstance(alignment, int):
        ends = [first + -(-one // alignment) * alignment for one in needed]
    else:
        ends = [first + max(needed, default=0)] * len(needed)
    return [end - length for end, length in zip(ends, lengths, strict=True)]


def finite(value: object) -> bool:
    """Whether a parameter is a finite number; booleans are none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(cast(float, value)) <= sys.float_info.max


def whole(value: object, least: int) -> bool:
    """Whether a parameter is a whole number of at least ``least``; booleans are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """How windows are encoded, and how the query reads them.

    For one head and one query row, segment ``s`` gives an output ``o_s`` and
    ``l_s = logsumexp`` of its logits. Attention over the union of the segments is exactly
    ``sum_s w_s o_s`` with ``w = softmax(l)``. Most methods change only that: ``temperature`` inside
    the context segment (all windows together), that segment's ``l`` (`slope` and `shift`), the
    query segment's ``l`` (`query_weight`), and where windows stand (`alignment`). The others are a
    step of their own, which the engine takes where it belongs: `refinement`, `recompute`,
    `selection`, `combination`.

    Subclasses are frozen dataclasses, one a file; a value outside its domain, or a method with
    which one can't be combined, raises `MethodError`. Class attributes ``name``, ``formula`` and
    ``paper`` describe them to users. Every property below may be a field of the dataclass instead;
    such a field needs a default.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    paper: ClassVar[str]

    def require(self, parameter: str, good: bool, wanted: str) -> None:
        """Refuse a parameter's value unless it is good, and say what it must be."""
        if not good:
            given = getattr(self, parameter)
            raise MethodError(f"{type(self).__name__} {parameter} must be {wanted}, not {given!r}.")

    def require_one(self, parameter: str, kind: Any) -> None:
        """Refuse a parameter's value unless it is one of a `Literal`."""
        names = list(get_args(kind))
        self.require(parameter, getattr(self, parameter) in names, f"one of {names}")

    @property
    def windowed(self) -> bool:
        """False where passages are read one after the other instead of side by side."""
        return True

    @property
    def temperature(self) -> float:
        """Divides the logits inside the context; 1 leaves them as they are."""
        return 1.0

    @property
    def slope(self) -> float:
        """Above 0: the context's log-sum-exp enters the merge as ``slope * l + shift``."""
        return 1.0

    @property
    def shift(self) -> float:
        """See `slope`."""
        return 0.0

    def query_weight(self, windows: int) -> float:
        """Factor, finite and above 0, on the weight of the query's own and of generated tokens."""
        return 1.0

    @property
    def alignment(self) -> Alignment:
        """Where windows stand; a cache finds a window by its position, too."""
        return "left"

    @property
    def encoding(self) -> str:
        """How windows are encoded: windows under one name and at one position are equal.

        A cache separates windows of different encodings, so a refinement's numbers all belong
        in here; how windows are read does not.
        """
        return "behind the prefix"

    @property
    def neighbours(self) -> int:
        """How many chunks in front of it in its document a window sees while it is encoded."""
        return 0

    @property
    def sink(self) -> int:
        """How many of the prefix's first tokens stand once more in front of each window then."""
        return 0

    @property
    def refinement(self) -> DeepThinking | None:
        """What changes encoded windows before anybody reads or stores them."""
        return None

    @property
    def recompute(self) -> Linked | None:
        """What lets the windows of one request see each other after each was encoded by itself."""
        return None

    @property
    def selection(self) -> Codebook | QueryLikelihood | None:
        """What narrows the windows to those that a query reads."""
        return None

    @property
    def combination(self) -> Combination | None:
        """What makes one distribution out of those of windows that answer each for itself."""
        return None


def waits_for_query(method: Method) -> bool:
    """Whether a step of a method has to know the query, after the windows are encoded."""
    again = method.recompute
    return method.selection is not None or (again is not None and again.choose in ("query", "last"))


def query_bias(method: Method, windows: int) -> float:
    """What a method adds to the query segment's log-sum-exp; 0 where it does not weigh it."""
    weight = method.query_weight(windows)
    if not finite(weight) or weight <= 0:
        raise MethodError(
            f"{method.name} gives the query the weight {weight!r} for {windows} windows, which "
            "must be a finite number above 0. Correct the method's query_weight."
        )
    return math.log(weight)
