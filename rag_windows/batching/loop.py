"""The loop of a batch: one forward pass gives each row its next token; rows come and go between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from rag_windows.attention.layers import check_tables, table_limit
from rag_windows.batching.row import Row
from rag_windows.generate import Decoder
from rag_windows.loading import input_device
from rag_windows.prefill import PASS_TOKENS
from rag_windows.steps.packed_rows import Plan, RowCaches, read_rows
from rag_windows.windows import WindowStore


class BatchLoop:
    """Answers many questions at token level, a token of each at a time.

    What rows share is held and read once. Not for several threads at once.

    Attributes:
        encoder: finds and encodes windows, which rows share.
        rows: that take part; those that have a KV cache stand first.
    """

    def __init__(self, encoder: WindowStore, decoder: Decoder) -> None:
        self.encoder = encoder.for_batch()
        self._decoder = decoder
        model = decoder.runner.model
        self._device = input_device(model)
        config = model.config.get_text_config(decoder=True)
        self._table_limit = table_limit(config)
        self.rows: list[Row] = []
        self._caches = RowCaches()
        self._plan: Plan[Row] | None = None

    @property
    def capacity(self) -> tuple[int, int]:
        """Rows and tokens that the KV caches hold without growing."""
        held = next(iter(self._caches.keys.values()), None)
        return (0, 0) if held is None else (held.shape[0], held.shape[2])

    @property
    def new_rows(self) -> list[Row]:
        """Those that no pass has taken yet."""
        return self.rows[len(self._caches.lengths) :]

    def admit(self, row: Row) -> None:
        """Let a row, whose context comes from `encoder`, join before the next step."""
        check_tables(self._table_limit, row.last)
        self._replan()
        self.rows.append(row)

    @torch.no_grad()
    def step(self) -> list[Row]:
        """One forward pass, and a token for each row that took part; returns rows that ended.

        What a pass itself raises comes out here; then every row stands where it stood before, and
        the next step tries it again with those that were not dropped.
        """
        if not self.rows:
            return []
        if self._plan is None:
            self._plan = self._planned()
        now = self._plan
        lengths = [*self._caches.lengths]
        try:
            logits, _ = read_rows(self._decoder.runner, now, self._caches, now.newest)
            largest = logits.argmax(dim=-1).tolist()
            now.recorder.settle()
        except BaseException:
            now.recorder.discard()
            self._caches.set_lengths(lengths)
            raise
        self._sample(now, logits, largest)
        ended = [row for row in now.rows if row.ended]
        if ended or len(now.rows) < len(self.rows) or now.old < len(now.rows):
            self._replan()
        for row in ended:
            self.drop(row)
        return ended

    def drop(self, row: Row) -> None:
        """Let a row leave, whether it ended or not."""
        index = self.rows.index(row)
        self._replan()
        row.leave()
        last = len(self._caches.lengths) - 1
        if index > last:
            self.rows.pop(index)
            return
        self._caches.remove(index)
        # The caches' last row took its place.
        self.rows[index] = self.rows[last]
        self.rows.pop(last)

    def _sample(self, now: Plan[Row], logits: torch.Tensor, largest: Sequence[int]) -> None:
        for index, row in enumerate(now.rows):
            try:
                row.take(largest[index] if row.greedy else row.sample(logits[index]))
            except BaseException as error:  # noqa: BLE001 - a caller's code; only its own row ends
                row.error, row.ended = error, True

    def _replan(self) -> None:
        """Discard the plan, and hand the attention weights that it recorded to the rows."""
        if self._plan is not None:
            self._plan.flush()
            self._plan = None

    def _planned(self) -> Plan[Row]:
        """A plan of the rows that have a KV cache, and of as many new ones as a pass takes."""
        old = len(self._caches.lengths)
        most = PASS_TOKENS[self._device.type != "cpu"]
        taken = 0
        for tokens in accumulate(len(row.fed) for row in self.new_rows):
            if taken and tokens > most:
                break
            taken += 1
        return Plan(self.rows[: old + taken], old)
