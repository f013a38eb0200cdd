"""Loaded models, shared by everybody who asks for the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_windows import loading
from rag_windows.calibration import Profile
from rag_windows.forks import in_children
from rag_windows.model import WindowedLM

T = TypeVar("T")

_VIEW = (
    "method",
    "max_window_tokens",
    "header",
    "template_kwargs",
    "text_tokens",
    "max_batch_tokens",
    "cache",
    "profile",
)
"""Arguments that choose how a model is read, not which weights are loaded."""


class _Same:
    """A value that equals itself only; it is kept alive so that its id can't be used again."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value


def as_key(value: Any) -> Hashable:
    """A hashable stand-in: equal for equal plain values and configurations, else by identity."""
    if value is None or isinstance(value, str | int | float | bytes):
        return type(value).__name__, value
    if isinstance(value, Path):
        return "path", str(value)
    if isinstance(value, Mapping):
        return "map", frozenset((str(key), as_key(entry)) for key, entry in value.items())
    if isinstance(value, Set):
        return "set", frozenset(as_key(entry) for entry in value)
    if isinstance(value, Sequence):
        return "list", tuple(as_key(entry) for entry in value)
    if type(value).__module__ == "torch":  # dtypes and devices
        return "torch", str(value)
    if isinstance(value, Profile):
        return "profile", value.to_json()
    described = getattr(value, "to_dict", None)
    if callable(described) and not isinstance(value, PreTrainedModel | PreTrainedTokenizerBase):
        return type(value).__name__, as_key(described())
    return _Same(value)


def folder_state(model: str | Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file of a local model; empty for a Hub name.

    A model that is saved again in the same folder is another model.
    """
    folder = loading.embedded_path(str(model)) if model in loading.EMBEDDED else Path(model)
    paths = folder.iterdir() if folder.is_dir() else [folder]
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return tuple(sorted((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in files))


class _Shelf(Generic[T]):
    """Values by key, held weakly; one thread makes a value, others wait for it."""

    def __init__(self) -> None:
        self._values: WeakValueDictionary[Hashable, T] = WeakValueDictionary()
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """What others were making never arrives in a child."""
        self._lock = threading.Lock()
        self._flights: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                return value
            flight = self._flights.get(key)
            waits = flight is not None
            if flight is None:
                flight = self._flights[key] = Future()
        if waits:
            return flight.result()
        try:
            value = make()
        except BaseException as error:
            self._land(key, flight, None)
            flight.set_exception(error)
            raise
        self._land(key, flight, value)
        flight.set_result(value)
        return value

    def _land(self, key: Hashable, flight: Future[T], value: T | None) -> None:
        with self._lock:
            if self._flights.get(key) is not flight:
                return  # cleared on the way
            del self._flights[key]
            if value is not None:
                self._values[key] = value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._flights.clear()


class _Weights:
    """A loaded model with its tokenizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.model = model
        self.tokenizer = tokenizer


_weights: _Shelf[_Weights] = _Shelf()
_models: _Shelf[WindowedLM] = _Shelf()
_holders: WeakKeyDictionary[WindowedLM, _Weights] = WeakKeyDictionary()


def load_shared(model: str | Path | PreTrainedModel, **arguments: Any) -> WindowedLM:
    """`WindowedLM.from_pretrained`, once for equal arguments.

    Calls that differ only in how the model is read (method, header, window size, template
    variables, passage cache) share its weights. Nothing is kept alive: when the last user of a
    model lets go of it, it is freed, and a later call loads it again. Threads that ask at once
    wait for one load; if it fails, all of them get its error and the next call tries again.

    Args:
        model: as in `WindowedLM.from_pretrained`.
        arguments: the others of `WindowedLM.from_pretrained`. Objects that are neither plain
            values nor configurations (a tokenizer, a header function) are compared by identity.

    Raises:
        ModelLoadError: not found, or can't be loaded.
        UnsupportedModelError: its attention can't be split into windows.
        ProfileError: the profile can't be used.
    """
    if arguments.get("profile") is not None:
        # By what it holds: the file may be another by the next call.
        arguments["profile"] = Profile.of(arguments["profile"])
    if isinstance(model, PreTrainedModel):
        key = as_key([model, arguments])
        return _models.get(key, lambda: WindowedLM.from_pretrained(model, **arguments))
    if not isinstance(model, str | Path):
        return WindowedLM.from_pretrained(model, **arguments)  # which says what is wrong
    view = {name: arguments[name] for name in _VIEW if name in arguments}
    load = {name: value for name, value in arguments.items() if name not in view}
    weights_key = as_key([str(model), load, folder_state(model)])

    def load_weights() -> _Weights:
        options = {"tokenizer": None, "dtype": "auto", "device_map": None, **load}
        return _Weights(*loading.resolve(model, **options))

    def make() -> WindowedLM:
        weights = _weights.get(weights_key, load_weights)
        revision = load.get("revision")
        lm = WindowedLM(weights.model, weights.tokenizer, revision=revision, **view)
        _holders[lm] = weights
        return lm

    return _models.get(as_key([weights_key, view]), make)


def clear() -> None:
    """Forget what was loaded: later calls load anew. Models in use stay with their users."""
    _weights.clear()
    _models.clear()
