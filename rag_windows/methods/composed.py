"""A method on top of another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, NoReturn

from rag_windows.errors import MethodError
from rag_windows.methods.base import Method
from rag_windows.methods.pcw import PCW


@dataclass(frozen=True, slots=True)
class Composed(Method):
    """Changes one thing about how windows are encoded or chosen, and leaves the rest to a reader.

    Attributes:
        reader: the method that reads the windows. Everything that a subclass does not change is
            the reader's.
    """

    reader: Method = field(default=PCW(), kw_only=True)

    reads_sequential: ClassVar[bool] = False
    """Whether the reader may be one that has no windows but one long one."""

    def __post_init__(self) -> None:
        wanted = f"a method such as APE() (by name, '{self.name}+ape')"
        self.require("reader", isinstance(self.reader, Method), wanted)
        if not self.reader.windowed and not self.reads_sequential:
            self.refuse(f"{self.reader.name} has no windows. Use ape or pcw.")
        if self.reader.name == "auto":
            self.refuse("auto chooses how windows are encoded, so it has to stand first.")
        if self.name in (one.name for one in chain(self.reader)):
            raise MethodError(
                f"{self.name} can't be combined with itself. Set its own parameters instead."
            )

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the reader, with the reason and what to do."""
        raise MethodError(f"{self.name} can't be combined with {self.reader.name}: {reason}")


for _name, _value in vars(Method).items():
    if isinstance(_value, property) or _name == "query_weight":
        setattr(Composed, _name, property(attrgetter(f"reader.{_name}")))


def chain(method: Method) -> list[Method]:
    """A method, its reader, that one's reader and so on."""
    return [method, *chain(method.reader)] if isinstance(method, Composed) else [method]
