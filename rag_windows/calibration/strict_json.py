"""JSON that means one thing: no key twice, and no number that JSON does not have."""

from __future__ import annotations

import json
import math
from typing import Any

from rag_windows.prompt.visible_text import encodable


def parse_json(text: str) -> Any:
    r"""The value of a JSON text.

    Half of a surrogate pair (``"\ud83d"``), which no tokenizer takes, becomes U+FFFD.

    Raises:
        ValueError: it is no JSON, is nested too deeply, holds NaN or an infinite number, or an
            object of it holds a key twice; no full stop at the message's end.
    """
    try:
        value = _parsed(text)
        if "\\ud" in text.lower():
            value = _parsed(encodable(json.dumps(value, ensure_ascii=False)))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON at line {error.lineno}, column {error.colno} ({error.msg})"
        ) from error
    except RecursionError as error:
        raise ValueError("lists and objects are nested too deeply; flatten them") from error
    return value


def _parsed(text: str) -> Any:
    return json.loads(
        text,
        object_pairs_hook=_unique,
        parse_constant=_no_number,
        parse_float=_finite,
        parse_int=_whole,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key[:80]!r} stands twice in one object; keep one")
        made[key] = value
    return made


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text[:80]!r} is no number that JSON has; write a finite one")


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:
        raise ValueError(f"a whole number has too many digits ({error})") from error
