"""Which of a context's windows a query reads, chosen by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from rag_windows.codebook.fusion import Fusion, fuse, pack_fused
from rag_windows.codebook.search import KeySearch, best, page_owners
from rag_windows.kv import Window

if TYPE_CHECKING:
    from rag_windows.context import EncodedContext
    from rag_windows.decoding import Decoder
    from rag_windows.encoding import Encoder
    from rag_windows.rescaling.alignment import Alignment


@dataclass(frozen=True, slots=True)
class KeySelection:
    """Chooses the passages whose keys are most like the query's, and fuses their windows.

    Attributes:
        retrieve: how many passages (citation groups); a passage is read with all its windows.
        search: how keys are compared.
        fusion: what becomes of the chosen windows.
    """

    retrieve: int
    search: KeySearch = field(default_factory=KeySearch)
    fusion: Fusion = "concat"

    def select(
        self, context: EncodedContext, query_ids: Sequence[int], decoder: Decoder
    ) -> EncodedContext:
        """The context that this query reads; chosen windows keep their order."""
        windows = context.singles
        chosen = self._chosen(context, query_ids, decoder)
        kept = [index for index, group in enumerate(context.groups) if group in chosen]
        read, groups = [windows[i] for i in kept], [context.groups[i] for i in kept]
        scores = [context.scores[i] for i in kept] if context.scores else []
        if self.fusion == "concat":
            narrow = context.narrowed(read, groups, scores)
            return replace(narrow, chosen=tuple(kept), window_tokens=context.window_tokens)
        fused = fuse(read, self.fusion)
        n_groups = 0 if context.windows is None else context.windows.n_groups
        narrow = context.narrowed([fused], [groups[0]])
        packed = pack_fused(fused, read, groups, n_groups)
        return replace(
            narrow, windows=packed, chosen=tuple(kept), window_tokens=context.window_tokens
        )

    def _chosen(
        self, context: EncodedContext, query_ids: Sequence[int], decoder: Decoder
    ) -> set[int]:
        groups = list(dict.fromkeys(context.groups))
        if len(groups) <= self.retrieve:
            return set(groups)
        alignment = context.method.alignment
        end = max(window.start + len(window.ids) for window in context.singles)
        query = encode_query(decoder.runner, context.prefix, query_ids, alignment, end)
        places = {group: place for place, group in enumerate(groups)}
        pages = [self.search.pages(window) for window in context.singles]
        windows = torch.tensor([places[group] for group in context.groups])
        owners = windows[page_owners([len(page) for page in pages])].to(pages[0].device)
        similarities = self.search.similarities(
            self.search.tokens(query), torch.cat(pages), owners, len(groups)
        )
        return {groups[place] for place in best(similarities, self.retrieve)}


def encode_query(
    encoder: Encoder,
    prefix: Window | None,
    query_ids: Sequence[int],
    alignment: Alignment = "left",
    end: int = 0,
) -> Window:
    """A query's keys as they would be if it were one more window.

    Keys hold their position. A query that stands where windows stand is rotated as they are, in
    every kind of model, so that equal tokens at equal places have equal keys.

    Args:
        encoder: of the model.
        prefix: behind which the windows were encoded.
        query_ids: at least one token.
        alignment: of the windows; with "right" the query ends where they do.
        end: position behind the furthest window; needed with "right" alone.
    """
    first = 0 if prefix is None else len(prefix.ids)
    start = max(first, end - len(query_ids)) if alignment == "right" else first
    return encoder.run([tuple(query_ids)], [start], prefix)[0]
