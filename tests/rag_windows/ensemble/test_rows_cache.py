"""A cache that moves the rows of a query together."""

from __future__ import annotations

import torch

from rag_windows.kv import RowsCache

WINDOWS = 3


def cache(queries: int = 2, tokens: int = 4) -> RowsCache:
    """Every key is its row's number, then the number of its token."""
    made = RowsCache(WINDOWS)
    rows = torch.arange(queries * WINDOWS).view(-1, 1, 1, 1).expand(-1, 1, tokens, 1)
    index = torch.arange(tokens).view(1, 1, -1, 1).expand_as(rows)
    for layer in range(2):
        made.update(torch.cat([rows, index], dim=-1), rows, layer)
    return made


def rows(made: RowsCache) -> list[int]:
    layer = made.layers[1]
    assert torch.equal(layer.keys[:, 0, 0, :1], layer.values[:, 0, 0])
    return layer.keys[:, 0, 0, 0].tolist()


def test_beams_change_places() -> None:
    made = cache()
    made.reorder_cache(torch.tensor([1, 1]))
    assert rows(made) == [3, 4, 5, 3, 4, 5]


def test_queries_are_repeated() -> None:
    made = cache()
    made.batch_repeat_interleave(2)
    assert rows(made) == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    RowsCache(WINDOWS).batch_repeat_interleave(2)


def test_queries_are_chosen() -> None:
    made = cache(3)
    made.batch_select_indices(torch.tensor([2, 0]))
    assert rows(made) == [6, 7, 8, 0, 1, 2]


def test_a_part_is_a_copy() -> None:
    made = cache()
    part = made.part([1, 1, 0], 2)
    assert rows(part) == [3, 4, 5, 3, 4, 5, 0, 1, 2]
    assert part.get_seq_length() == 2
    part.reorder_cache(torch.tensor([2, 2, 2]))
    assert rows(made) == [0, 1, 2, 3, 4, 5]
    assert made.get_seq_length() == 4
