"""A question that waits for its answer."""

from __future__ import annotations

from concurrent.futures import Future

from rag_windows.batch.ticket import Ticket
from rag_windows.errors import without_stop_iteration
from rag_windows.generation import Generation


class Scheduled(Future[Generation]):
    """A question on its way.

    Args:
        ticket: of the question.
    """

    def __init__(self, ticket: Ticket) -> None:
        super().__init__()
        self.ticket = ticket

    def set_exception(self, exception: BaseException | None) -> None:
        """Fail; a StopIteration is told as what the asker can await."""
        super().set_exception(None if exception is None else without_stop_iteration(exception))

    def cancel(self) -> bool:
        """Stop: at once if it has not begun, else after this forward pass, encoded or not.

        Returns:
            Whether it had not begun. Otherwise the result is what was written so far, its
            ``finish_reason`` "cancelled".
        """
        self.ticket.cancelled.set()
        return super().cancel()
