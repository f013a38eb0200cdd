"""Keys: equal for equal windows only, and out of reach without the salt."""

from __future__ import annotations

import hashlib
import hmac
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


def test_the_salt_is_the_key_of_an_hmac() -> None:
    """Whoever knows all but the salt can't compute it from anything public."""
    version = keys.FORMAT_VERSION.to_bytes(8, "big")
    said = (version, b"m" * 32, b"t" * 32, b"behind the prefix", b"as computed")
    numbers = (
        b"".join(number.to_bytes(8, "little") for number in pair) for pair in ((1, 2), (3, 4))
    )
    behind = keys.fields(b"window", *said, next(numbers))
    message = behind + keys.fields((2).to_bytes(8, "big"), next(numbers))
    secret = hashlib.sha256(keys.fields(b"rag-windows passage cache, salt", b"ours")).digest()
    assert window_key(**BASE) == hmac.new(secret, message, hashlib.sha256).hexdigest()
