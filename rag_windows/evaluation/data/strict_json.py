"""JSON that means one thing: no key twice, no NaN, no half of a character."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rag_windows.evaluation.data.fields import Place, shown

# A pair of surrogates; one alone (what the group holds); any other escape, so that the second
# backslash of an escaped one begins nothing.
_SURROGATES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
# The longest thing that a cut leaves unread: an escape of six characters.
_TAIL = 6


class _Repeated(dict[str, Any]):
    """An object in which a key stands twice."""

    key = ""


class _NoNumber:
    """What stands where a number that JSON doesn't have stood."""

    def __init__(self, text: str) -> None:
        self.text = text


def parse(text: str, place: Place, *, offset: int = 0) -> Any:
    r"""The value of a JSON text.

    Half of a surrogate pair (``"\ud83d"``), which no tokenizer takes, becomes U+FFFD.

    Args:
        text: the text.
        place: of it, for messages.
        offset: bytes of the file before it.

    Raises:
        DataError: it is no JSON, is cut off or nested too deeply, holds NaN or an infinite number,
            or an object of it holds a key twice.
    """
    flaws: list[object] = []

    def unite(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        repeated = _Repeated(made)
        repeated.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        flaws.append(repeated)
        return repeated

    def refuse(number: str) -> _NoNumber:
        flaws.append(number)
        return _NoNumber(number)

    def number(digits: str) -> Any:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    if "\\ud" in text or "\\uD" in text:
        text = _SURROGATES.sub(lambda match: "\\ufffd" if match[1] else match[0], text)
    try:
        value = json.loads(text, object_pairs_hook=unite, parse_constant=refuse, parse_float=number)
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()) - _TAIL
        byte = offset + len(text[: error.pos].encode()) + 1
        line = f"line {error.lineno}, " if not place.record else ""
        raise place.error(
            f"not valid JSON at {line}column {error.colno}, byte {byte} ({error.msg}); "
            + ("it may be cut off: fetch or write it again." if cut else "correct it there.")
        ) from error
    except RecursionError as error:
        raise place.error("lists and objects are nested too deeply; flatten them.") from error
    except ValueError as error:
        raise place.error(f"a whole number has too many digits ({error}).") from error
    if flaws:
        _tell(value, place)
    return value


def _tell(value: Any, place: Place) -> None:
    """Raise the first flaw in the order of the file, with the way to it."""
    waiting = [(place, value)]
    while waiting:
        where, one = waiting.pop()
        if isinstance(one, _Repeated):
            raise where.error(f"the key {shown(one.key)} stands twice in one object; keep one.")
        if isinstance(one, _NoNumber):
            raise where.error(f"{shown(one.text)} is no number that JSON has; write a finite one.")
        inside: list[tuple[str, Any]] = []
        if isinstance(one, dict):
            inside = [(shown(key), child) for key, child in one.items()]
        elif isinstance(one, list):
            inside = [(f"entry {number}", child) for number, child in enumerate(one, start=1)]
        waiting.extend((where.at(name), child) for name, child in reversed(inside))
