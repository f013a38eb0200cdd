"""The single steps of one call: ordinary at first, by a recording once that pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from rag_windows.attention.layout import Layout
from rag_windows.step.recorded import RecordedStep
from rag_windows.step.room import Room
from rag_windows.step.tail import StaticTail

if TYPE_CHECKING:
    from rag_windows.step.steps import Steps


class Session:
    """Answers the steps of one call that feed one token.

    Two ordinary steps surround a recording: what the first fed is recorded, and the second, which
    feeds another token at another place, is what the recording's answer is compared with.

    Args:
        steps: of the model.
        room: of the call's tail.
        layout: of this call.
        new_tokens: that the call may generate.
    """

    def __init__(self, steps: Steps, room: Room, layout: Layout, new_tokens: int) -> None:
        self._steps = steps
        self._room = room
        self._layout = layout
        # The query's own pass gives the first.
        self._left = new_tokens - 1
        self._ordinary = 0
        self._recorded: RecordedStep | None = None

    def step(
        self,
        tail: StaticTail,
        ids: torch.Tensor,
        position: torch.Tensor,
        ordinary: Callable[[], Any],
    ) -> Any:
        """The model's output for one token, which the tail holds then.

        Args:
            tail: of this call.
            ids: (1, 1) int64.
            position: (1, 1) int64.
            ordinary: the same step in the ordinary way.
        """
        self._left -= 1
        place, recorded = tail.get_seq_length(), self._recorded
        ready = self._steps.usable and tail.placed
        if ready and recorded and recorded.proven and place < self._room.capacity:
            logits, *shares = recorded.replay(ids, position, place)
            tail.advance()
            self._put(place, shares)
            return CausalLMOutputWithPast(logits=logits, past_key_values=tail)
        output = ordinary()
        self._ordinary += 1
        if not ready:
            return output
        # An ordinary step finds room for its token, if it has to elsewhere.
        if recorded and recorded.current:
            expected = [output.logits, *self._shares(place)]
            self._steps.prove(recorded, ids, position, place, expected)
        elif self._ordinary > self._steps.eager_steps and self._left >= self._steps.pays_from:
            self._recorded = self._steps.record(
                self, self._room, self._layout, ids, position, place
            )
        return output

    def close(self) -> None:
        """Let go of what was recorded."""
        self._recorded = None

    def _shares(self, place: int) -> list[torch.Tensor]:
        """What an ordinary step recorded of the token's attention mass, as a replay gives it."""
        mass = self._layout.mass
        if mass is None:
            return []
        layers = mass.shares[self._layout.position(place)]
        return [torch.stack([layers[number] for number in sorted(layers)])]

    def _put(self, place: int, shares: list[torch.Tensor]) -> None:
        mass = self._layout.mass
        if mass is None:
            return
        for layer, share in enumerate(shares[0]):
            mass.put(layer, self._layout.position(place), share)
