"""Which of a context's windows a query reads, chosen by their keys, and how they come together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rag_windows.kv import Window, Windows
from rag_windows.methods import Alignment, Codebook
from rag_windows.methods.codebook import Fusion, page_owners
from rag_windows.prefill import EncodedContext, ModelEncoder


def fuse(windows: Sequence[Window], fusion: Fusion) -> Window:
    """One window whose keys and values at a position are the mean or the sum of those there.

    Windows are laid over each other position by position, from the first of any to the last; where
    a shorter one has no token, those that have one count. Keys are rotated already, but those that
    are mixed stand at one position. Its tokens stand for nothing but their number.
    """
    start = min(window.start for window in windows)
    length = max(window.end for window in windows) - start
    counts = _present(windows, start, length).sum(dim=0).view(1, -1, 1)

    def mixed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first = tensors[0]
        exact = torch.promote_types(first.dtype, torch.float32)
        total = first.new_zeros((first.shape[0], length, first.shape[2]), dtype=exact)
        for window, tensor in zip(windows, tensors, strict=True):
            total[:, window.start - start : window.end - start] += tensor.to(exact)
        return (total / counts.to(total) if fusion == "mean" else total).to(first.dtype)

    keys = tuple(map(mixed, zip(*(window.keys for window in windows), strict=True)))
    values = tuple(map(mixed, zip(*(window.values for window in windows), strict=True)))
    return Window((0,) * length, start, keys, values)


def read_fused(
    fused: Window, windows: Sequence[Window], groups: Sequence[int], n_groups: int
) -> Windows:
    """A fused window as the one that is read; passages share the attention on a position.

    Positions at which the same passages have a token are one span.
    """
    present = _present(windows, fused.start, len(fused.ids))
    same, counts = present.T.unique_consecutive(dim=0, return_counts=True)
    shares = torch.zeros(len(counts), n_groups, dtype=torch.float32)
    shares.index_add_(1, torch.tensor(list(groups)), same.float())
    return Windows((fused,), tuple(counts.tolist()), shares / shares.sum(dim=1, keepdim=True))


def _present(windows: Sequence[Window], start: int, length: int) -> torch.Tensor:
    """(windows, length) bool: which window has a token at which position behind ``start``."""
    index = torch.arange(start, start + length)
    return torch.stack([(index >= window.start) & (index < window.end) for window in windows])


def select(
    selection: Codebook, context: EncodedContext, query_ids: Sequence[int], encoder: ModelEncoder
) -> EncodedContext:
    """The context that this query reads; chosen windows keep their order."""
    chosen = context.choosing(_chosen(selection, context, query_ids, encoder))
    if selection.fusion == "concat":
        return chosen
    fused = fuse(chosen.each, selection.fusion)
    together = read_fused(fused, chosen.each, chosen.groups, context.n_groups)
    return replace(chosen.narrowed([fused], [chosen.groups[0]]), windows=together)


def _chosen(
    selection: Codebook, context: EncodedContext, query_ids: Sequence[int], encoder: ModelEncoder
) -> set[int]:
    groups = list(dict.fromkeys(context.groups))
    if len(groups) <= selection.retrieve:
        return set(groups)
    alignment = context.method.alignment
    end = max(window.end for window in context.each)
    query = encode_query(encoder, context.prefix, query_ids, alignment, end)
    places = {group: place for place, group in enumerate(groups)}
    pages = [selection.pages(window) for window in context.each]
    windows = torch.tensor([places[group] for group in context.groups])
    owners = windows[page_owners([len(page) for page in pages])].to(pages[0].device)
    alike = selection.similarities(selection.tokens(query), torch.cat(pages), owners, len(groups))
    # Of equal ones the first.
    order = torch.sort(alike, descending=True, stable=True).indices
    return {groups[place] for place in order[: selection.retrieve].tolist()}


def encode_query(
    encoder: ModelEncoder,
    prefix: Window | None,
    query_ids: Sequence[int],
    alignment: Alignment = "left",
    end: int = 0,
) -> Window:
    """A query as if it were one more window, so that its keys are rotated as theirs are."""
    first = 0 if prefix is None else len(prefix.ids)
    start = max(first, end - len(query_ids)) if alignment != "left" else first
    return encoder.run([tuple(query_ids)], [start], prefix)[0]
