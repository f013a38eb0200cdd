"""The query's weight as the engine adds it."""

from __future__ import annotations

import math
import sys

from rag_windows.errors import MethodError
from rag_windows.rescaling.base import Method


def query_bias(method: Method, windows: int) -> float:
    """What a method adds to the query segment's log-sum-exp; 0 where it does not weigh it.

    Raises:
        MethodError: the method's weight is not a finite number above 0.
    """
    weight = method.query_weight(windows)
    if not isinstance(weight, int | float) or not 0 < weight <= sys.float_info.max:
        raise MethodError(
            f"{method.name} weighs the query by {weight!r} for {windows} windows; a weight must be "
            "a finite number above 0."
        )
    return math.log(weight)
