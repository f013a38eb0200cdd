"""The recorded steps of one model: how many there are, from when on, and whether they are right.

A recording reads the windows where they stand. Buffers of its own would let it serve any call, but
copies of a long context cost more memory than the whole step is allowed to. So each call has its
own, and makes it once it has generated enough to be worth one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from rag_windows.attention.layout import Layout
from rag_windows.attention.support import EXACT_TOLERANCE, ROUGH_TOLERANCE
from rag_windows.context import EncodedContext
from rag_windows.step.graphs import Graphs
from rag_windows.step.recorded import RecordedStep
from rag_windows.step.room import Room
from rag_windows.step.session import Session
from rag_windows.step.tail import StaticTail
from rag_windows.step.view import make_step_view
from rag_windows.windows import PackedWindows

logger = logging.getLogger(__name__)

EAGER_STEPS = 8
"""Ordinary steps of a call before one is recorded. A recording takes the host about as long as a
few steps (it runs the step twice, then the driver builds the graph), so a call that ends
early does not pay for one, and one that goes on loses little. Reasoned, not measured."""

PAYS_FROM = 32
"""Tokens that a call must still be allowed to generate for a recording to be made. Likewise."""

AHEAD = 512
"""New tokens for which there is room at once; a call that writes more moves to a larger room, in
which the step is recorded anew."""

MAX_RECORDINGS = 8
"""Recordings that exist at a time. Calls beyond them take ordinary steps."""


class Steps:
    """Lends recorded steps to calls; for several threads at once.

    Attributes:
        view: the model whose single steps are taken here; for transformers' generate.
        eager_steps: as `EAGER_STEPS`.
        pays_from: as `PAYS_FROM`.

    Args:
        twin: the model with our attention.
        graphs: record on its device.
        eager_steps: see above.
        pays_from: see above.
        max_recordings: as `MAX_RECORDINGS`.
    """

    def __init__(
        self,
        twin: PreTrainedModel,
        graphs: Graphs,
        *,
        eager_steps: int = EAGER_STEPS,
        pays_from: int = PAYS_FROM,
        max_recordings: int = MAX_RECORDINGS,
    ) -> None:
        self.view = make_step_view(twin)
        self.eager_steps = eager_steps
        self.pays_from = pays_from
        self._twin = twin
        self._graphs = graphs
        self._max = max_recordings
        self._lock = threading.Lock()
        self._holders: set[Session] = set()
        self._usable = True

    @property
    def usable(self) -> bool:
        """Whether no recording has failed yet."""
        return self._usable

    @property
    def device(self) -> torch.device:
        """Where steps are recorded."""
        return self._graphs.device

    @contextmanager
    def lend(
        self,
        context: EncodedContext,
        layout: Layout,
        windows: PackedWindows,
        query_tokens: int,
        new_tokens: int,
    ) -> Iterator[StaticTail]:
        """A tail for one call of `view`, with the session that takes its steps.

        Args:
            context: what the call reads.
            layout: of the call.
            windows: of the layout.
            query_tokens: of the query.
            new_tokens: that the call may generate.
        """
        room = Room(windows, layout.prefix_length + query_tokens + min(new_tokens, AHEAD))
        tail = StaticTail(room, context.prefix)
        session = tail.session = Session(self, room, layout, new_tokens)
        try:
            yield tail
        finally:
            # The caller may keep the tail, as the ordinary cache that it then is.
            tail.session = None
            tail.settle()
            session.close()
            with self._lock:
                self._holders.discard(session)

    def record(
        self,
        session: Session,
        room: Room,
        layout: Layout,
        ids: torch.Tensor,
        position: torch.Tensor,
        place: int,
    ) -> RecordedStep | None:
        """Record a step that an ordinary one has just taken; None where too many exist.

        Args:
            session: that will hold it.
            room: of its tail.
            layout: of its call.
            ids: (1, 1) int64.
            position: (1, 1) int64.
            place: of the token in the room.
        """
        with self._lock:
            if session not in self._holders and len(self._holders) >= self._max:
                return None
            self._holders.add(session)
        try:
            recorded = RecordedStep(self._graphs, self._twin, room, layout)
            recorded.record(ids, position, place)
        except self._graphs.errors as error:
            self._give_up(f"could not be recorded ({error})")
            return None
        return recorded

    def prove(
        self,
        recorded: RecordedStep,
        ids: torch.Tensor,
        position: torch.Tensor,
        place: int,
        expected: Sequence[torch.Tensor],
    ) -> None:
        """Compare a recording's answer with that of an ordinary step.

        One that fails or answers otherwise ends recording for good: it may never change what comes
        out.
        """
        try:
            answer = recorded.replay(ids, position, place)
            pairs = list(zip(answer, expected, strict=True))
            recorded.proven = all(self._agree(*pair) for pair in pairs)
        except self._graphs.errors as error:
            self._give_up(f"could not be launched again ({error})")
            return
        if not recorded.proven:
            self._give_up("differs from the ordinary one")

    def _agree(self, answer: torch.Tensor, expected: torch.Tensor) -> bool:
        exact = self._twin.dtype in (torch.float32, torch.float64)
        wanted = expected.float()
        difference = (answer.float() - wanted).norm() / wanted.norm().clamp_min(1e-6)
        return bool(difference <= (EXACT_TOLERANCE if exact else ROUGH_TOLERANCE))

    def _give_up(self, reason: str) -> None:
        with self._lock:
            first, self._usable = self._usable, False
        if first:
            logger.warning("Decoding in recorded steps is left out: a step %s.", reason)
