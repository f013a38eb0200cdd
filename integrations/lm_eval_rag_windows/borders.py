"""Where few-shot examples begin and end in a prompt that came as one string.

The harness hands over a finished prompt, without the examples it was made of. It joins them with a
delimiter (a blank line, for nearly all tasks), but texts may hold that delimiter as well. What is
found here only says where the prompt is cut; its text stays the same wherever that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_VALUE = 24
"""A document's value that is shorter may stand in an example by chance."""

NEIGHBOURHOOD = 16
"""Characters on each side of a delimiter by which it is found in a document's values."""


@dataclass(frozen=True, slots=True)
class Borders:
    """Character offsets into a prompt.

    Attributes:
        start: where the examples begin; before it stands a description of the task, or nothing.
        ends: where each example ends, its delimiter included. The question follows the last one.
            Empty where there are no examples; then all of the prompt is the question.
    """

    start: int = 0
    ends: tuple[int, ...] = ()


def find_borders(
    text: str, delimiter: str, *, shots: int | None = None, doc: Any = None
) -> Borders:
    """Tell a description, examples and the question apart.

    With ``shots`` the delimiters are counted: if every example and the question have equally many
    parts, with or without one more for the description, that is it. Otherwise, or without
    ``shots``:

    1. A delimiter that lies in a long value of the question's own document, or ends one, belongs
       to the question, as do all parts behind it.
    2. If other parts have a line that begins like the question's last line ("Answer:"), then an
       example ends with such a part. One part more in the first example than in all others is the
       description. A question of one line needs several such parts at equal distances.
    3. Otherwise each part is an example.

    Args:
        text: the prompt.
        delimiter: what the task puts behind an example.
        shots: how many examples there are; None if that is not known.
        doc: the document that the question was made of.
    """
    ends = list(_ends(text, delimiter))
    if not ends or shots == 0:
        return Borders()
    if shots is not None and (counted := _counted(ends, shots)) is not None:
        return counted
    values = [value for value in _strings(doc) if len(value.strip()) >= LEAST_VALUE]
    own = 0
    while ends and _belongs(text, ends[-1], delimiter, values):
        ends.pop()
        own += 1
    if not ends:
        return Borders()
    lines = [line.strip() for line in text[ends[-1] :].splitlines() if line.strip()]
    parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    closing = [i for i, part in enumerate(parts) if _has_line(part, lines[-1])]
    if not closing:
        return Borders(0, tuple(ends))
    own += len(parts) - closing[-1]
    sizes = [b - a for a, b in zip([-1, *closing], closing, strict=False)]
    usual = Counter(sizes[1:]).most_common(1)[0][0] if len(sizes) > 1 else own
    alike = set(sizes[1:]) <= {usual}
    described = alike and sizes[0] == usual + 1
    if len(lines) == 1:
        # All of the question, which an example may begin with by chance.
        regular = alike and usual == own and sizes[0] - described == usual
        if len(sizes) == 1 or not regular:
            return Borders(0, tuple(ends))
    return Borders(ends[0] if described else 0, tuple(ends[i] for i in closing))


def _ends(text: str, delimiter: str) -> Iterator[int]:
    """Ends of the delimiters that have something on both sides."""
    at = text.find(delimiter) if delimiter else -1
    while at >= 0:
        end = at + len(delimiter)
        if text[:at].strip() and text[end:].strip():
            yield end
        at = text.find(delimiter, end)


def _counted(ends: Sequence[int], shots: int) -> Borders | None:
    """Examples of equally many parts, if that is what the number of parts says."""
    each, more = divmod(len(ends) + 1, shots + 1)
    if each == 0 or more > 1:
        return None
    start = ends[0] if more else 0
    return Borders(start, tuple(ends[more + each * (i + 1) - 1] for i in range(shots)))


def _belongs(text: str, end: int, delimiter: str, values: Sequence[str]) -> bool:
    """Whether a delimiter lies in one of the values, or right behind one."""
    start = end - len(delimiter)
    around = text[max(0, start - NEIGHBOURHOOD) : end + NEIGHBOURHOOD].strip()
    before = text[:start].rstrip()
    return any(around in value or before.endswith(value.strip()) for value in values)


def _has_line(part: str, cue: str) -> bool:
    return any(line.strip().startswith(cue) for line in part.splitlines())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for entry in value:
            yield from _strings(entry)
