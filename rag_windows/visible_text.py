"""Text of others, made harmless to show and to read; needs neither torch nor transformers."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

# Control characters (a terminal obeys them), marks that reverse or hide text, line separators, and
# lone surrogates (no encoder takes them). Tab and line feed stay.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Spell out control characters, for example ESC as ``\x1b``; tab and line feed stay."""
    return _UNSEEN.sub(_spelled, text)


def one_line(text: str) -> str:
    """The same on one line, with single spaces."""
    return visible(" ".join(text.split()))


def encodable(text: str) -> str:
    """Replace what can't be UTF-8, as undecodable bytes of a command line, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def strict_json(text: str) -> str:
    """The same JSON text as UTF-8 can hold it: half surrogate pairs become U+FFFD.

    ValueError where it is no JSON, holds NaN, infinity or a key twice, or nests too deeply.
    """
    try:
        value = json.loads(text, object_pairs_hook=_keys_once, parse_constant=_not_a_number)
        return encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} appears twice in an object")
    return made


def _not_a_number(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number in JSON")


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
