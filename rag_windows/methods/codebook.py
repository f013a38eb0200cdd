"""Windows of which each query reads the few whose keys suit it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rag_windows.errors import MethodError
from rag_windows.methods.base import whole
from rag_windows.methods.composed import Composed

if TYPE_CHECKING:
    import torch

    from rag_windows.kv import Window

Similarity = Literal["cosine", "dot", "euclidean"]
Fusion = Literal["concat", "mean", "sum"]


@dataclass(frozen=True, slots=True)
class Codebook(Composed):
    """The query reads only those passages whose keys are most like its own.

    All passages are encoded, refined where ``reader`` refines them (such a store was proposed with
    Deep-Thinking, https://arxiv.org/abs/2305.13016), and stored. The query is encoded like one more
    window, so that its keys are rotated as theirs are. ``reader`` then reads the ``retrieve``
    passages with the most similar keys. A window is cut into *pages* of ``page`` tokens; a page's
    key is the mean of its tokens' keys, and the best page of a window counts::

        s(window) = mean over query tokens t of max over pages g of
                    mean over layers l and heads h of  sim(q[l, h, t], k[l, h, g])

    A passage that was split into several windows is read or left out as a whole. Passages given to
    ``generate`` are all encoded for the request, or found in a cache. `WindowedLM.codebook` makes a
    store that keeps passages encoded and reads only the chosen ones.

    Attributes:
        size: largest number of passages of such a store, None for any number; unused without one.
        retrieve: number of passages that a query reads.
        similarity: "cosine", "dot" or "euclidean" (the negative squared distance).
        fusion: what the query reads. "concat": the chosen windows, side by side, as if no others
            had been given. "mean" and "sum": one window, which has at each position the mean or the
            sum of the keys, and of the values, of those that reach it; windows are laid over each
            other from the first position on (right-aligned ones from the last), so that only keys
            that were rotated alike are mixed.
        layers: the layers whose keys are compared, negative numbers counting from the last. None
            takes two, the one at half of the depth and the last: keys of the first layers say
            little more than position and spelling.
        page: number of tokens whose keys are averaged; 1 compares every token and takes the most
            memory.
    """

    size: int | None = None
    retrieve: int = 8
    similarity: Similarity = "cosine"
    fusion: Fusion = "concat"
    layers: tuple[int, ...] | None = None
    page: int = 4

    name: ClassVar[str] = "codebook"
    formula: ClassVar[str] = "reader's, over the windows of the keys most like the query's"
    paper: ClassVar[str] = "-"

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        sized = self.size is None or whole(self.size, 1)
        self.require("size", sized, "a number of passages, or None")
        self.require("retrieve", whole(self.retrieve, 1), "a number of passages above 0")
        self.require_one("similarity", Similarity)
        self.require_one("fusion", Fusion)
        layers = (0,) if self.layers is None else self.layers
        numbers = isinstance(layers, tuple) and all(type(one) is int for one in layers)
        self.require("layers", bool(layers) and numbers, "layers, such as (-2, -1), or None")
        self.require("page", whole(self.page, 1), "a number of tokens above 0")
        if self.reader.recompute is not None or self.reader.alignment == "in order":
            self.refuse("its windows see each other before the query is known; use ape or pcw.")
        if self.fusion != "concat" and self.reader.combination is not None:
            self.refuse(f"fusion={self.fusion!r} leaves one window; use fusion='concat'.")

    @property
    def selection(self) -> Codebook | None:
        """Itself."""
        return self

    def compares_as(self, other: Codebook) -> bool:
        """Whether both compare the same keys in the same way."""
        mine, theirs = ((one.similarity, one.layers, one.page) for one in (self, other))
        return mine == theirs

    def layers_of(self, depth: int) -> tuple[int, ...]:
        """The layers compared in a model of ``depth`` layers, ascending."""
        wanted = (depth // 2, depth - 1) if self.layers is None else self.layers
        outside = [layer for layer in wanted if not -depth <= layer < depth]
        if outside:
            raise MethodError(
                f"The codebook compares the keys of layer {outside[0]}, but this model has layers "
                f"0 to {depth - 1}. Choose other layers, or None for the default."
            )
        return tuple(sorted({layer % depth for layer in wanted}))

    def tokens(self, query: Window) -> torch.Tensor:
        """What is compared of a query: (tokens, width), fp32; width is all heads of all layers."""
        return self._rows(query, 1)

    def pages(self, window: Window) -> torch.Tensor:
        """What is compared of a window: (pages, width), fp32."""
        return self._rows(window, self.page)

    def _rows(self, window: Window, page: int) -> torch.Tensor:
        import torch

        layers = self.layers_of(len(window.keys))
        device = window.keys[layers[0]].device
        parts = []
        for layer in layers:
            keys = window.keys[layer]
            keys = keys.to(device, torch.promote_types(keys.dtype, torch.float32)).mT
            # Of a short last page the tokens that are there count.
            keys = torch.nn.functional.avg_pool1d(keys, page, ceil_mode=True).mT
            if self.similarity == "cosine":
                keys = torch.nn.functional.normalize(keys, dim=-1)
            # Dot products of rows that are scaled so are means over layers and heads.
            keys = keys / math.sqrt(len(layers) * keys.shape[0])
            parts.append(keys.transpose(0, 1).flatten(1))
        return torch.cat(parts, dim=1)

    def similarities(
        self, tokens: torch.Tensor, pages: torch.Tensor, owners: torch.Tensor, count: int
    ) -> torch.Tensor:
        """(count,) fp32 similarity of a query's tokens with each owner of pages; higher is closer.

        ``owners`` (pages,) int64 says whose each page is; each owner has at least one.
        """
        alike = pages @ tokens.T
        if self.similarity == "euclidean":
            alike = 2 * alike - pages.square().sum(-1, keepdim=True) - tokens.square().sum(-1)
        best = alike.new_full((count, len(tokens)), -math.inf)
        best.scatter_reduce_(0, owners.unsqueeze(-1).expand_as(alike), alike, "amax")
        return best.mean(dim=-1)


def page_owners(counts: Sequence[int]) -> torch.Tensor:
    """(P,) int64: the owner of each page, from how many pages each one has."""
    import torch

    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
