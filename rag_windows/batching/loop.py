"""The loop of a batch: one forward pass gives each row its next token; rows come and go between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from rag_windows.attention.layers import check_tables, table_limit
from rag_windows.attention.layout import use_layout
from rag_windows.batching.layout import BatchLayout, Plan, RowCaches
from rag_windows.batching.rows import Asked, Row
from rag_windows.batching.shared_encoder import SharedEncoder
from rag_windows.errors import InputError
from rag_windows.generate import Decoder
from rag_windows.loading import input_device
from rag_windows.prefill import PASS_TOKENS, WindowEncoder


class BatchLoop:
    """Answers many questions at token level, a token of each at a time.

    What rows share is held and read once. Not for several threads at once.

    Attributes:
        encoder: encodes windows that no row reads yet.
        rows: that take part; those that have a KV cache stand first.

    Args:
        encoder: of the model.
        decoder: of the model.
    """

    def __init__(self, encoder: WindowEncoder, decoder: Decoder) -> None:
        self.encoder = SharedEncoder(encoder)
        self._decoder = decoder
        self._model = decoder.runner.model
        self._device = input_device(self._model)
        config = self._model.config.get_text_config(decoder=True)
        self._table_limit = table_limit(config)
        self.rows: list[Row] = []
        self._caches = RowCaches()
        self._plan: Plan | None = None

    @property
    def new_rows(self) -> list[Row]:
        """Those that no pass has taken yet."""
        return self.rows[len(self._caches.lengths) :]

    def admit(self, asked: Asked) -> Row | None:
        """Let a row, whose context comes from `encoder`, join before the next step.

        Returns:
            The row; or None if a batch can't do what its options turn out to ask for, or if the
            row alone would leave the positions up to which the model's rotary tables stay.
        """
        if not asked.query_ids:
            raise InputError("The query has no tokens; ask something.")
        context = asked.context
        last = context.query_start + len(asked.query_ids) + asked.options["max_new_tokens"]
        if context.windows:
            check_tables(self._table_limit, last)
        elif self._table_limit is not None and last > self._table_limit:
            return None
        self._decoder.follow()
        row = Row(self._decoder, asked)
        if not row.servable:
            return None
        self._replan()
        self.rows.append(row)
        return row

    @torch.no_grad()
    def step(self) -> list[Row]:
        """One forward pass, and a token for each row that took part.

        What a pass itself raises comes out here; then every row stands where it stood before, and
        the next step tries it again with those that were not dropped.

        Returns:
            Rows that ended; they have left. A row's ``error`` says what its own processors or
            criteria raised.
        """
        if not self.rows:
            return []
        if self._plan is None:
            self._plan = self._planned()
        now = self._plan
        lengths = [*self._caches.lengths]
        try:
            logits, layout = self._pass(now)
            largest = logits.argmax(dim=-1).tolist()
        except BaseException:
            self._caches.undo(lengths)
            raise
        now.keep(layout.recorded)
        self._sample(now, logits, largest)
        ended = [row for row in now.rows if row.ended]
        if ended or len(now.rows) < len(self.rows) or now.old < len(now.rows):
            self._replan()
        for row in ended:
            self.drop(row)
        return ended

    def _pass(self, now: Plan) -> tuple[torch.Tensor, BatchLayout]:
        """Logits of each row's next token (rows, vocabulary), fp32; what the pass recorded."""
        self._caches.grow(now.lengths)
        positions = torch.cat(
            [torch.arange(row.position, row.position + len(row.fed)) for row in now.rows]
        )
        fed = torch.tensor([[token for row in now.rows for token in row.fed]])
        layout = BatchLayout(self._decoder.runner.sliding_windows, now, self._caches, positions)
        with use_layout(layout):
            output = self._model(
                fed.to(self._device),
                position_ids=positions.unsqueeze(0).to(self._device),
                use_cache=False,
                logits_to_keep=now.newest,
            )
        return torch.as_tensor(output.logits)[0].float(), layout

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

    def _sample(self, now: Plan, logits: torch.Tensor, largest: Sequence[int]) -> None:
        for index, row in enumerate(now.rows):
            try:
                row.take(largest[index] if row.greedy else row.sample(logits[index]))
            except BaseException as error:  # noqa: BLE001 - a caller's code; only its own row ends
                row.error, row.ended = error, True

    def _replan(self) -> None:
        """Have the next step plan anew, and settle what the plan of before has measured."""
        if self._plan is not None:
            self._plan.flush()
            self._plan = None

    def _planned(self) -> Plan:
        """A plan of the rows that have a KV cache, and of as many new ones as a pass takes."""
        old = len(self._caches.lengths)
        most = PASS_TOKENS[self._device.type != "cpu"]
        taken = 0
        for tokens in accumulate(len(row.fed) for row in self.new_rows):
            if taken and tokens > most:
                break
            taken += 1
        return Plan(self.rows[: old + taken], old)
