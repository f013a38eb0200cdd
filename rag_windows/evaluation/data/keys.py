"""What names the records of a file, and the texts that they can't do without."""

from __future__ import annotations

from typing import Any

from rag_windows.evaluation.data.fields import Place, checked, field, shown


class Keys:
    """Names of records: their "id" where they have one, else their number."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def take(self, record: dict[str, Any], number: int, place: Place) -> str:
        """The name of a record.

        Args:
            record: may have an "id", a string or a whole number.
            number: of the record, from 1.
            place: of the record.

        Raises:
            DataError: the "id" is something else, or another record has this name.
        """
        name = record.get("id")
        if name is None:
            key = str(number)
        else:
            key = str(name) if type(name) is int else checked(name, str, place, '"id"')
        if key in self._places:
            raise place.error(
                f'the "id" {shown(key)} stands in {self._places[key]} too; make it unique.'
                if name is not None
                else f'it has no "id", and {self._places[key]} has its number as "id"; give it one.'
            )
        self._places[key] = place.record
        return key


def filled(record: dict[str, Any], name: str, place: Place) -> str:
    """A text that must be there and not blank.

    Raises:
        DataError: it is missing, no string, or blank.
    """
    text = field(record, name, str, place)
    if not text.strip():
        raise place.error(f'"{name}" is blank; fill it in, or take the record out.')
    return text
