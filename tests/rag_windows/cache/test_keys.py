"""Keys: equal for equal windows only, and out of reach without the salt."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rag_windows.cache import keys

BASE: dict[str, Any] = {
    "model": b"m" * 32,
    "tokenizer": b"t" * 32,
    "encoding": "behind the prefix",
    "prefix_ids": [1, 2],
    "start": 2,
    "ids": [3, 4],
    "salt": "ours",
    "store": "as computed",
}


ids = st.lists(st.integers(min_value=0, max_value=2**40), max_size=8)


def window_key(*, start: int, ids: list[int], salt: Any, **fixed: Any) -> str:
    return keys.KeyScope(keys.salt_key(salt), **fixed).window_key(ids, start)


@given(ids, ids, ids, ids)
def test_tokens_that_move_between_prefix_and_window_change_the_key(
    prefix: list[int], window: list[int], other_prefix: list[int], other: list[int]
) -> None:
    pairs: list[tuple[list[int], list[int]]] = [(prefix, window), (other_prefix, other)]
    pairs += [(prefix + window, []), ([], prefix + window)]
    made = {window_key(**{**BASE, "prefix_ids": one, "ids": two}) for one, two in pairs}
    assert len(made) == len({(tuple(one), tuple(two)) for one, two in pairs})
