"""Models that are loaded once, when they are needed, and shared by all who ask for them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rag_windows import loading
from rag_windows.calibration import Profile
from rag_windows.errors import InputError, ModelLoadError, ToolsUnsupportedError
from rag_windows.model import WindowedLM
from rag_windows.prompt.tools import ToolFormat
from rag_windows.threads import Lock


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
    """Name, size and time of each file of a local model, which is another one when saved again.

    Empty for a Hub name.
    """
    folder = loading.embedded_path(str(model)) if model in loading.EMBEDDED else Path(model)
    paths = folder.iterdir() if folder.is_dir() else [folder]
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return tuple(sorted((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in files))


_lock = Lock()
_models: WeakValueDictionary[Hashable, WindowedLM] = WeakValueDictionary()
_weights: WeakValueDictionary[Hashable, PreTrainedModel] = WeakValueDictionary()
_tokenizers: WeakKeyDictionary[PreTrainedModel, PreTrainedTokenizerBase | None] = (
    WeakKeyDictionary()
)

_NOT_OF_WEIGHTS = (
    "method",
    "max_window_tokens",
    "header",
    "template_kwargs",
    "text_tokens",
    "max_batch_tokens",
    "cache",
    "profile",
)
"""Arguments of `WindowedLM.from_pretrained` that do not say which weights are loaded."""


def load_shared(model: str | Path | PreTrainedModel, **arguments: Any) -> WindowedLM:
    """`WindowedLM.from_pretrained`, once for equal arguments.

    Calls that differ only in how the model is used (method, header, window size, template
    variables, passage cache) share its weights. Nothing is kept alive: when the last user of a
    model lets go of it, it is freed, and a later call loads it again. Threads that ask at once
    wait for one load; if it fails, the next one tries again.

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
    if not isinstance(model, str | Path | PreTrainedModel):
        return WindowedLM.from_pretrained(model, **arguments)  # which says what is wrong
    used = {name: arguments[name] for name in _NOT_OF_WEIGHTS if name in arguments}
    load = {name: value for name, value in arguments.items() if name not in used}
    named = not isinstance(model, PreTrainedModel)
    loaded = as_key([str(model), load, folder_state(model)] if named else [model, load])
    key = (loaded, as_key(used))
    lm = _models.get(key)
    if lm is not None:
        return lm  # whoever else is being loaded
    with _lock:
        lm = _models.get(key)
        if lm is None and not named:
            lm = _models[key] = WindowedLM.from_pretrained(model, **arguments)
        if lm is None:
            weights = _weights.get(loaded)
            if weights is None:
                options = {"tokenizer": None, "dtype": "auto", "device_map": None, **load}
                weights, tokenizer = loading.resolve(model, **options)
                _weights[loaded], _tokenizers[weights] = weights, tokenizer
            revision = load.get("revision")
            lm = WindowedLM(weights, _tokenizers[weights], revision=revision, **used)
            _models[key] = lm
        return lm


def clear() -> None:
    """Forget what was loaded: later calls load anew. Models in use stay with their users."""
    _weights.clear()
    _models.clear()


class ModelSource:
    """A model that is loaded when it is first needed, or is loaded already.

    Configuration and tokenizer can be had before, from the model's files. Copies, deep ones too,
    share the model.

    Args:
        model: name, folder, or a loaded transformers model; None with ``lm``.
        lm: a loaded `WindowedLM`, instead of ``model`` and all others.
        tokenizer: a loaded one, its name or folder; None for the model's own.
        tokenizer_kwargs: for loading the tokenizer.
        arguments: the others of `WindowedLM.from_pretrained`; those that are None are left out.

    Attributes:
        model: as given.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None,
        *,
        lm: WindowedLM | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.model = model
        self._lm = lm
        self._tokenizer = tokenizer
        self._tokenizer_kwargs = dict(tokenizer_kwargs or {})
        self._arguments = {k: value for k, value in arguments.items() if value is not None}
        self._lock = Lock()

    def __copy__(self) -> ModelSource:
        return self

    def __deepcopy__(self, memo: object) -> ModelSource:
        return self

    @property
    def by_name(self) -> bool:
        """Whether the weights can be loaded again by name."""
        return isinstance(self.model, str | Path)

    @property
    def name(self) -> str:
        """The model's name, as far as it has one."""
        model = self._lm.model if self._lm is not None and self.model is None else self.model
        if isinstance(model, PreTrainedModel):
            return str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        return str(model)

    def lm(self) -> WindowedLM:
        """The model, loaded if it is not yet; see `load_shared`."""
        with self._lock:
            if self._lm is None:
                if self.model is None:
                    raise ModelLoadError("There is no model to load.")
                tokenizer = self._given_tokenizer()
                given = {} if tokenizer is None else {"tokenizer": tokenizer}
                self._lm = load_shared(self.model, **self._arguments, **given)
            return self._lm

    def config(self) -> PreTrainedConfig:
        """The model's configuration, without the weights where they are not loaded yet.

        Raises:
            ModelLoadError: not found.
        """
        if isinstance(self.model, PreTrainedModel):
            return self.model.config
        if self._lm is not None or self.model is None:
            return self.lm().model.config
        return _config(str(self.model), self._files(), folder_state(self.model))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, read without the weights where these are not loaded yet.

        Raises:
            ModelLoadError: not found, not even with the weights.
        """
        with suppress(ModelLoadError):
            return self.read_tokenizer()
        self.lm()
        return self.read_tokenizer()

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        """Like `tokenizer`, but never loads weights.

        Raises:
            ModelLoadError: not found without them.
        """
        tokenizer = self._given_tokenizer() if self._lm is None else self._lm.tokenizer
        if tokenizer is None and self._lm is None and isinstance(self.model, str | Path):
            tokenizer = _tokenizer(str(self.model), self._files(), folder_state(self.model))
        if tokenizer is None:
            raise ModelLoadError("The model has no tokenizer; give it as tokenizer=.")
        return tokenizer

    def template_kwargs(self) -> Mapping[str, Any]:
        """Further variables of the chat template."""
        if self._lm is not None:
            return self._lm.template_kwargs
        return dict(self._arguments.get("template_kwargs") or {})

    def tool_format(self) -> ToolFormat | None:
        """How the chat template writes calls of tools; None where it has none that can be read.

        Raises:
            ModelLoadError: no tokenizer was found.
        """
        try:
            return ToolFormat.of(self.tokenizer(), self.template_kwargs())
        except ToolsUnsupportedError:
            return None

    def _files(self) -> tuple[tuple[str, Any], ...]:
        """Options that say which files are read."""
        names = ("revision", "token", "cache_dir", "gguf_file", "local_files_only")
        return tuple((name, self._arguments[name]) for name in names if name in self._arguments)

    def _given_tokenizer(self) -> PreTrainedTokenizerBase | None:
        tokenizer, kwargs = self._tokenizer, self._tokenizer_kwargs
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            return tokenizer
        if tokenizer is None and not kwargs:
            return None
        if tokenizer is None and not self.by_name:
            raise InputError("tokenizer_kwargs need tokenizer_name= beside a loaded model=.")
        name = str(tokenizer or self.model)
        if any(isinstance(value, list | dict | set) for value in kwargs.values()):
            return loading.load_tokenizer(name, **kwargs)
        return _tokenizer(name, tuple(kwargs.items()), folder_state(name))


@lru_cache(maxsize=4)
def _config(model: str, files: tuple[tuple[str, Any], ...], state: Hashable) -> PreTrainedConfig:
    return loading.load_config(model, **dict(files))


@lru_cache(maxsize=4)
def _tokenizer(
    name: str, options: tuple[tuple[str, Any], ...], state: Hashable
) -> PreTrainedTokenizerBase:
    return loading.load_tokenizer(name, **dict(options))
