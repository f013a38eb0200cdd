"""How often and when a file was used, kept in its time of modification.

A read verifies the whole content, so that time carries no other meaning. One `utimensat` per hit
keeps recency and frequency for every process and over restarts: no journal to compact, to lock or
to repair, and the knowledge goes with the file. The seconds are the last use. Of the nanoseconds,
units of 100 (finer ones are lost on some file systems) hold a count of uses, 0 to 999, and the
cost of encoding on a logarithmic scale. Where a file system keeps whole seconds only, frequency
and cost are lost at a restart, recency isn't.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MOST_USES = 999

_COSTS = 10_000
_UNIT_NS = 100
_SECOND_NS = 1_000_000_000
_LEAST_LOG10, _STEPS_PER_DECADE = -5.0, 1000.0  # 10 microseconds to 10^5 seconds, 0.2% apart


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of one file.

    Attributes:
        last_used: unix time in whole seconds.
        uses: times it was read, up to `MOST_USES`.
        cost_s: seconds that encoding took, within 0.2%.
    """

    last_used: int
    uses: int
    cost_s: float

    def used(self, now: float) -> Usage:
        """The same after one more use."""
        return replace(self, last_used=int(now), uses=min(self.uses + 1, MOST_USES))

    def as_ns(self) -> int:
        """The time of modification that says it, in nanoseconds."""
        cost = max(self.cost_s, 10.0**_LEAST_LOG10) if math.isfinite(self.cost_s) else 1.0
        step = round((math.log10(cost) - _LEAST_LOG10) * _STEPS_PER_DECADE)
        code = min(self.uses, MOST_USES) * _COSTS + min(step, _COSTS - 1)
        return self.last_used * _SECOND_NS + code * _UNIT_NS


def from_ns(modified_ns: int) -> Usage:
    """Read a time of modification; any time is some usage."""
    last_used, rest = divmod(modified_ns, _SECOND_NS)
    uses, step = divmod(rest // _UNIT_NS, _COSTS)
    return Usage(last_used, uses, 10.0 ** (_LEAST_LOG10 + step / _STEPS_PER_DECADE))
