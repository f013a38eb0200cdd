"""Encodes windows by the model's own cache, where they can't share one attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from rag_windows.attention.layers import position_limit
from rag_windows.attention.mirror import ModelMirror
from rag_windows.errors import MethodError
from rag_windows.kv import Window
from rag_windows.loading import input_device
from rag_windows.methods import DeepThinking, Method, QueryLikelihood
from rag_windows.prefill import EncodedContext, ModelEncoder, PlannedWindow
from rag_windows.steps.model_cache import ModelCache


class RowEncoder(ModelEncoder):
    """Runs the model over prefix and window as over any text, and takes apart what its cache holds.

    A window that was encoded in sight of neighbours holds them, too: its row reads them.

    Args:
        mirror: the model with its own attention.
        max_batch_tokens: see `ModelEncoder`.
        reason: why windows can't share its attention.

    Raises:
        UnsupportedModelError: rows can't go on from its cache.
    """

    form: ModelCache

    def __init__(
        self, mirror: ModelMirror, max_batch_tokens: int | None = None, *, reason: str
    ) -> None:
        self._reason = reason
        super().__init__(mirror, max_batch_tokens)

    def _derive(self) -> None:
        version = self.mirror.version
        before = getattr(self, "form", None)
        form = ModelCache(self.model)
        if before is not None:
            # Of an edited model, until a window of it was encoded.
            form.continues = before.continues
            form.token_bytes, form.state_bytes = before.token_bytes, before.state_bytes
        self.form = form
        self.sliding_windows = ()
        self._table_limit = None
        self._position_limit = position_limit(self.model.config)
        self._last_layer = None
        self._version = version

    def check_method(self, method: Method) -> None:
        """Refuse methods for which windows would have to share one attention."""
        selection = method.selection
        reader = selection.reader if isinstance(selection, QueryLikelihood) else method
        in_rows = method.combination is not None or not reader.windowed
        plain = method.refinement is None and method.recompute is None and not method.sink
        chosen = selection is None or isinstance(selection, QueryLikelihood)
        if in_rows and plain and chosen and method.alignment == "left":
            return
        kind = self.model.config.model_type
        raise MethodError(
            f"The method {method.name!r} needs windows that share one attention, which those of "
            f"model type '{kind}' can't: {self._reason}. Use method='pced', in which each passage "
            "is read in a row of its own, or 'ensemble', 'auto' or 'sequential'."
        )

    def ids_of(self, planned: PlannedWindow) -> tuple[int, ...]:
        """Tokens of the window that is encoded for a planned one: its neighbours' as well."""
        return planned.before + planned.ids

    def encode_pass(
        self,
        prefix: Window | None,
        windows: Sequence[PlannedWindow],
        refinement: DeepThinking | None = None,
    ) -> dict[int, Window]:
        """Encode some windows in one forward pass: of the longest, those of one length.

        States know no padding.
        """
        texts = [self.ids_of(one) for one in windows]
        longest = max(map(len, texts))
        most = max(1, self.pass_tokens // longest)
        chosen = [index for index, text in enumerate(texts) if len(text) == longest][:most]
        start = 0 if prefix is None else len(prefix.ids)
        made = self.run([texts[index] for index in chosen], [start] * len(chosen), prefix)
        return dict(zip(chosen, made, strict=True))

    def run(
        self,
        windows: Sequence[Sequence[int]],
        starts: Sequence[int],
        prefix: Window | None,
        before: Sequence[Window] = (),
        *,
        gradients: bool = False,
    ) -> list[Window]:
        """One forward pass over windows of one length; see `ModelEncoder.run`."""
        head = [] if prefix is None else [prefix]
        behind = [[*head, *([before[index]] if before else [])] for index in range(len(windows))]
        if not self.form.continues:
            # As the model takes one token at a time behind a cache, it runs over everything anew.
            seen = [[token for one in row for token in one.ids] for row in behind]
            texts = [[*own, *window] for own, window in zip(seen, windows, strict=True)]
            behind = [[] for _ in windows]
        else:
            texts = [list(window) for window in windows]
        device = input_device(self.model)
        lengths = [sum(len(one.ids) for one in row) for row in behind]
        ids = torch.tensor(texts, device=device)
        positions = torch.tensor(lengths, device=device).unsqueeze(1)
        positions = positions + torch.arange(ids.shape[1], device=device)
        with torch.set_grad_enabled(gradients):
            cache = self.form.behind(behind)
            self.form.feed(self.model, ids, cache, lengths, positions, 1)
            return self.form.windows(cache, windows, starts)

    @torch.no_grad()
    def first_row(self, context: EncodedContext, query_ids: Sequence[int]) -> torch.Tensor:
        """Logits (tokens, vocabulary), fp32, of a query in the row of the first window."""
        device, start = input_device(self.model), context.query_start
        ids = torch.tensor([[*query_ids]], device=device)
        positions = torch.arange(start, start + ids.shape[1], device=device).unsqueeze(0)
        cache = context.new_cache()
        return cache.read(self.model, ids, positions, ids.shape[1])[0].float()

    @torch.no_grad()
    def by_token(self, seen: Sequence[int], query_ids: Sequence[int]) -> torch.Tensor:
        """The same behind tokens, in one row to which the model's cache adds token by token."""
        device, found = input_device(self.model), []
        cache = self.form.fresh()
        pieces = [[*seen], *([token] for token in query_ids)]
        for start, piece in zip(accumulate(map(len, pieces), initial=0), pieces, strict=False):
            ids = torch.tensor([piece], device=device)
            positions = torch.arange(start, start + len(piece), device=device).unsqueeze(0)
            found.append(self.form.feed(self.model, ids, cache, [start], positions, 1)[0])
        return torch.cat(found[1:]).float()
