"""Keys: equal for equal windows only, and out of reach without the salt."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows import InputError
from rag_windows.cache.keys import KeyScope, fields, id_bytes, salt_key


def passage_key(*, start: int, ids: list[int], salt: Any, **fixed: Any) -> str:
    return KeyScope(salt_key(salt), **fixed).window_key(ids, start)


BASE: dict[str, Any] = {
    "model": b"m" * 32,
    "tokenizer": b"t" * 32,
    "encoding": "behind the prefix",
    "prefix_ids": [1, 2],
    "start": 2,
    "ids": [3, 4],
    "salt": None,
    "store": "as computed",
    "version": 1,
}
CHANGES: dict[str, Any] = {
    "model": b"n" * 32,
    "tokenizer": b"u" * 32,
    "encoding": "right aligned",
    "prefix_ids": [1, 3],
    "start": 3,
    "ids": [3, 5],
    "salt": "ours",
    "store": "int8",
    "version": 2,
}
parts = st.lists(st.binary(max_size=12), max_size=5)
ids = st.lists(st.integers(min_value=0, max_value=2**40), max_size=8)


@given(parts, parts)
def test_different_parts_never_join_to_the_same_bytes(one: list[bytes], other: list[bytes]) -> None:
    assert (fields(*one) == fields(*other)) == (one == other)


@given(ids, ids)
def test_different_ids_have_different_bytes(one: list[int], other: list[int]) -> None:
    assert (id_bytes(one) == id_bytes(other)) == (one == other)


def test_a_key_is_64_lowercase_hexadecimal_digits() -> None:
    assert re.fullmatch("[0-9a-f]{64}", passage_key(**BASE))


@pytest.mark.parametrize("name", CHANGES)
def test_every_part_changes_the_key(name: str) -> None:
    assert passage_key(**BASE) == passage_key(**BASE)
    assert passage_key(**{**BASE, name: CHANGES[name]}) != passage_key(**BASE)


@given(ids, ids, st.integers(min_value=0, max_value=8))
def test_tokens_that_move_between_prefix_and_window_change_the_key(
    prefix: list[int], window: list[int], cut: int
) -> None:
    whole = prefix + window
    cut = min(cut, len(whole))
    moved = {**BASE, "prefix_ids": whole[:cut], "ids": whole[cut:]}
    stays = {**BASE, "prefix_ids": prefix, "ids": window}
    assert (passage_key(**moved) == passage_key(**stays)) == (cut == len(prefix))


def test_a_prefix_is_no_window() -> None:
    scope = KeyScope(
        salt_key(None), model=b"m", tokenizer=b"t", encoding="e", store="s", prefix_ids=[]
    )
    assert scope.prefix_key() != scope.window_key([], 0)


def test_the_salt_is_the_key_of_an_hmac() -> None:
    """Whoever knows all but the salt can't compute it from anything public."""
    given_parts = (b"\0" * 7 + b"\1", b"m" * 32, b"t" * 32, b"behind the prefix", b"as computed")
    behind = fields(b"window", *given_parts, id_bytes([1, 2]))
    message = behind + fields((2).to_bytes(8, "big"), id_bytes([3, 4]))
    secret = hashlib.sha256(fields(b"rag-windows passage cache, salt", b"ours")).digest()
    expected = hmac.new(secret, message, hashlib.sha256).hexdigest()
    assert passage_key(**{**BASE, "salt": "ours"}) == expected


@pytest.mark.parametrize("salt", ["", b"", 5])
def test_an_empty_or_foreign_salt_is_refused(salt: Any) -> None:
    with pytest.raises(InputError, match="salt"):
        salt_key(salt)
