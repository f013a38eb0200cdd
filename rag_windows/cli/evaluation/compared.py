"""From --methods and --top-k to the arms of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rag_windows.errors import InputError, MethodError

if TYPE_CHECKING:
    from rag_windows.evaluation.arm import Arm
    from rag_windows.methods import Method


@dataclass(frozen=True, slots=True)
class Compared:
    """What is compared, as given on the command line.

    Attributes:
        methods: names with commas between them, perhaps with parameters; see `resolve`.
        depths: numbers of passages; (None,) for all that an example brings.
        temperature: APE's, for each method whose name sets none; or None.
        scale: likewise.
        link_tokens: for each method with windows, or None.
        profile: path of a calibration, whose method's numbers replace the defaults; or None.
    """

    methods: str
    depths: tuple[int | None, ...]
    temperature: float | None = None
    scale: float | None = None
    link_tokens: Any = None
    profile: str | None = None


def arms_of(compared: Compared) -> tuple[Arm, ...]:
    """Each method at each depth.

    Raises:
        MethodError: an unknown name, or a number outside a method's domain.
        InputError: nothing, or something twice; or a number that none of the methods has.
        ProfileError: the profile can't be read.
    """
    from rag_windows.evaluation.arm import arms
    from rag_windows.methods import linked, resolve
    from rag_windows.methods.registry import names_in

    names = names_in(compared.methods)
    if "" in names:
        raise InputError(
            f"--methods {compared.methods!r} has an empty name; write names with commas between "
            "them, such as sequential,ape."
        )
    methods = [(name, resolve(name)) for name in names]
    if compared.profile is not None:
        methods = _profiled(methods, compared)
    methods = _numbered(methods, compared)
    chosen = [(name, linked(method, compared.link_tokens)) for name, method in methods]
    return arms(chosen, compared.depths)


def _profiled(methods: list[tuple[str, Method]], compared: Compared) -> list[tuple[str, Method]]:
    from rag_windows.calibration import Profile

    if compared.temperature is not None or compared.scale is not None:
        raise InputError(
            "--profile brings its method's numbers: leave --rag-temperature and --rag-scale out."
        )
    found = Profile.load(str(compared.profile)).method
    if not any(method.name == found.name for _, method in methods):
        raise InputError(
            f"--profile holds numbers of {found.name}, which is not among --methods; add it."
        )
    return [
        (name, found if method.name == found.name and ":" not in name else method)
        for name, method in methods
    ]


def _numbered(methods: list[tuple[str, Method]], compared: Compared) -> list[tuple[str, Method]]:
    from rag_windows.methods.registry import known_parameters, with_known

    given = {"temperature": compared.temperature, "scale": compared.scale}
    numbers = {key: value for key, value in given.items() if value is not None}
    for key in numbers:
        if not any(key in known_parameters(method) for _, method in methods):
            raise MethodError(f"--rag-{key} is a parameter of none of --methods; leave it out.")

    def free(name: str) -> dict[str, float]:
        return {key: value for key, value in numbers.items() if f"{key}=" not in name}

    return [(name, with_known(method, free(name))) for name, method in methods]
