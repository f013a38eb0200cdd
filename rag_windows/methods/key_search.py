"""How alike the keys of a query and of a window are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from rag_windows.errors import MethodError
from rag_windows.kv import Window

Similarity = Literal["cosine", "dot", "euclidean"]


@dataclass(frozen=True, slots=True)
class KeySearch:
    """Which keys are compared, and how.

    A window is cut into *pages* of ``page`` tokens; a page's key is the mean of its tokens' keys.
    For one query token and one page the similarity is the mean over the chosen layers and over the
    heads; of the pages the best one counts, and the query's tokens count alike::

        s(window) = mean over query tokens t of max over pages g of
                    mean over layers l and heads h of  sim(q[l, h, t], k[l, h, g])

    Attributes:
        similarity: "cosine", "dot", or "euclidean" (the negative squared distance).
        layers: indices, negative ones from the last; None for two, the one at half of the model's
            depth and the last: first layers' keys say little more than position and spelling.
        page: tokens a page; 1 compares every token and takes the most memory.

    Raises:
        MethodError: a value outside its domain.
    """

    similarity: Similarity = "cosine"
    layers: tuple[int, ...] | None = None
    page: int = 4

    def __post_init__(self) -> None:
        if self.similarity not in get_args(Similarity):
            raise MethodError(
                f"similarity must be one of {list(get_args(Similarity))}, got {self.similarity!r}."
            )
        if type(self.page) is not int or self.page < 1:
            raise MethodError(f"page must be a number of tokens above 0, got {self.page!r}.")
        layers = self.layers
        if layers is not None and (
            not isinstance(layers, tuple)
            or not layers
            or any(type(one) is not int for one in layers)
        ):
            raise MethodError(
                f"layers must be a tuple of layers, such as (-2, -1), or None; got {layers!r}."
            )

    def of(self, depth: int) -> tuple[int, ...]:
        """The layers compared in a model of ``depth`` layers, ascending.

        Raises:
            MethodError: the model has no such layer.
        """
        wanted = (depth // 2, depth - 1) if self.layers is None else self.layers
        outside = [layer for layer in wanted if not -depth <= layer < depth]
        if outside:
            raise MethodError(
                f"The codebook compares the keys of layer {outside[0]}, and this model has layers "
                f"0 to {depth - 1}; choose others, or None for the default."
            )
        return tuple(sorted({layer % depth for layer in wanted}))

    def pages(self, window: Window) -> torch.Tensor:
        """What is compared of a window: (pages, width), fp32; width is all heads of all layers."""
        return self._rows(window, self.page)

    def tokens(self, query: Window) -> torch.Tensor:
        """What is compared of a query: (tokens, width), fp32."""
        return self._rows(query, 1)

    def similarities(
        self, tokens: torch.Tensor, pages: torch.Tensor, owners: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Similarity of a query with each owner of pages.

        Args:
            tokens: from `tokens`.
            pages: (P, width), those of all owners.
            owners: (P,) int64, whose page each one is, below ``count``.
            count: owners; each has at least one page.

        Returns:
            (count,) fp32, higher is more alike.
        """
        alike = pages @ tokens.T
        if self.similarity == "euclidean":
            alike = 2 * alike - pages.square().sum(-1, keepdim=True) - tokens.square().sum(-1)
        best = alike.new_full((count, len(tokens)), -torch.inf)
        best.scatter_reduce_(0, owners.unsqueeze(-1).expand_as(alike), alike, "amax")
        return best.mean(dim=-1)

    def _rows(self, window: Window, page: int) -> torch.Tensor:
        layers = self.of(len(window.keys))
        device = window.keys[layers[0]].device
        parts = []
        for layer in layers:
            keys = _means(window.keys[layer], page).to(device)
            if self.similarity == "cosine":
                keys = torch.nn.functional.normalize(keys, dim=-1)
            # Dot products of rows that are scaled so are means over layers and heads.
            keys = keys / math.sqrt(len(layers) * keys.shape[0])
            parts.append(keys.transpose(0, 1).flatten(1))
        return torch.cat(parts, dim=1)


def best(similarities: torch.Tensor, count: int) -> list[int]:
    """Indices of the ``count`` highest, highest first; of equal ones the first."""
    order = torch.sort(similarities, descending=True, stable=True).indices
    return [int(index) for index in order[:count].tolist()]


def page_owners(counts: Sequence[int]) -> torch.Tensor:
    """(P,) int64: the owner of each page, from how many pages each one has."""
    numbers = torch.tensor(list(counts), dtype=torch.int64)
    return torch.arange(len(numbers)).repeat_interleave(numbers)


def _means(keys: torch.Tensor, page: int) -> torch.Tensor:
    """(heads, pages, dim), fp32, from (heads, tokens, dim); the last page may be short."""
    exact = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if page == 1:
        return exact
    whole = exact.shape[1] // page * page
    means = exact[:, :whole].unflatten(1, (-1, page)).mean(dim=2)
    if whole == exact.shape[1]:
        return means
    return torch.cat([means, exact[:, whole:].mean(dim=1, keepdim=True)], dim=1)
