"""One recorded step: what it reads and writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rag_windows.attention.layout import Layout, use_layout
from rag_windows.attention.mass import MassRecorder
from rag_windows.step.attention import BlindAttention
from rag_windows.step.graphs import Graphs
from rag_windows.step.room import Room
from rag_windows.step.tail import StaticTail


class RecordedStep:
    """A step of one call, and the addresses of its inputs; for one thread at a time.

    A recording holds the addresses of the windows, the weights, the room and the inputs, and the
    numbers of the layout, so it is the call's own.

    Attributes:
        proven: whether its answer has been compared with that of an ordinary step.

    Args:
        graphs: on the model's device.
        twin: the model with our attention.
        room: of the call's tail.
        layout: of the call; it has windows.
    """

    def __init__(self, graphs: Graphs, twin: PreTrainedModel, room: Room, layout: Layout) -> None:
        self.proven = False
        self._graphs = graphs
        self._room = room
        self._capacity = room.capacity
        self._ids = torch.zeros(1, 1, dtype=torch.int64, device=room.index.device)
        self._position = self._ids.clone()
        attention = BlindAttention(room, self._position)
        # Not the tail of the call: that one counts what it is told to hold.
        tail = StaticTail(room, None)

        def run() -> tuple[torch.Tensor, ...]:
            mass = None if layout.mass is None else MassRecorder(0)
            attention.forget()
            blind = replace(layout, override=attention, mass=mass)
            with room.blindly(), use_layout(blind), torch.no_grad():
                output: Any = twin(
                    self._ids, position_ids=self._position, past_key_values=tail, use_cache=True
                )
            attention.forget()
            logits = torch.as_tensor(output.logits)
            return (logits,) if mass is None else (logits, _stacked(mass))

        self._run = run

    @property
    def current(self) -> bool:
        """Whether it is a step in the room as it is: a grown one stands elsewhere."""
        return self._capacity == self._room.capacity

    def record(self, ids: torch.Tensor, position: torch.Tensor, place: int) -> None:
        """Record the step.

        Args:
            ids: (1, 1) int64: a token.
            position: (1, 1) int64: of the token.
            place: its index in the room.
        """
        with self._graphs.turn():
            self._take(ids, position, place)
            self._run = self._graphs.record(self._run)

    def replay(
        self, ids: torch.Tensor, position: torch.Tensor, place: int
    ) -> tuple[torch.Tensor, ...]:
        """Launch the step with other inputs; arguments as for `record`.

        Returns:
            Logits (1, 1, vocabulary), and where the call records attention mass the shares
            (layers, 1, groups + 2) fp32.
        """
        with self._graphs.turn():
            self._take(ids, position, place)
            # The next turn may overwrite the results, whoever's it is.
            return tuple(result.clone() for result in self._run())

    def _take(self, ids: torch.Tensor, position: torch.Tensor, place: int) -> None:
        self._ids.copy_(ids)
        self._position.copy_(position)
        self._room.index.fill_(place)


def _stacked(mass: MassRecorder) -> torch.Tensor:
    """(layers, 1, groups + 2) fp32: the shares of the one row that was recorded."""
    (layers,) = mass.shares.values()
    return torch.stack([layers[number] for number in sorted(layers)])
