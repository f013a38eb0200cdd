"""Models that are loaded once, when they are needed, and shared by all who ask for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rag_windows import loading
from rag_windows.calibration import Profile
from rag_windows.errors import InputError, ModelLoadError, ToolsUnsupportedError
from rag_windows.model import WindowedLM
from rag_windows.prompt.reasoning import ReasoningFormat
from rag_windows.prompt.tools import ToolFormat
from rag_windows.threads import Lock


def _as_key(value: Any) -> Hashable:
    """Equal for equal plain values and configurations, else for one and the same object."""
    if isinstance(value, Mapping):
        return "map", frozenset((str(key), _as_key(entry)) for key, entry in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "list", tuple(map(_as_key, value))
    if isinstance(value, Profile):
        return "profile", value.to_json()
    if isinstance(value, Hashable):
        return type(value), value
    described = getattr(value, "to_dict", None)  # a quantization's configuration
    # What can't be compared is never shared.
    return _as_key(described()) if callable(described) else object()


def folder_state(model: str | Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file of a local model, which is another one when saved again.

    Empty for a Hub name.
    """
    folder = loading.embedded_path(str(model)) or Path(model)
    paths = folder.iterdir() if folder.is_dir() else [folder]
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return tuple(sorted((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in files))


_lock = Lock()
_models: WeakValueDictionary[tuple[Hashable, Hashable], WindowedLM] = WeakValueDictionary()
"""By the arguments that say which weights are loaded, and how they are used."""

_USES = (
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
    variables, passage cache) share its weights. References are weak: when the last user of a
    model lets go of it, it is freed, and a later call loads it again. Threads that ask at once
    wait for one load; if it fails, the next one tries again.

    Arguments and errors are those of `WindowedLM.from_pretrained`. Objects that are neither plain
    values nor configurations (a tokenizer, a header function) are compared by identity.
    """
    if arguments.get("profile") is not None:
        # By what it holds: the file may be another by the next call.
        arguments["profile"] = Profile.of(arguments["profile"])
    if not isinstance(model, str | Path | PreTrainedModel):
        return WindowedLM.from_pretrained(model, **arguments)  # which raises the error
    uses = {name: arguments[name] for name in _USES if name in arguments}
    load = {name: value for name, value in arguments.items() if name not in uses}
    named = not isinstance(model, PreTrainedModel)
    weights = _as_key([str(model), load, folder_state(model)] if named else [model, load])
    key = (weights, _as_key(uses))
    lm = _models.get(key)
    if lm is not None:
        return lm  # whoever else is being loaded
    with _lock:
        lm = _models.get(key)
        if lm is None:
            other = next((one for (same, _), one in _models.items() if same == weights), None)
            if other is None:
                lm = WindowedLM.from_pretrained(model, **arguments)
            else:
                revision = load.get("revision")
                lm = WindowedLM(other.model, other.tokenizer, revision=revision, **uses)
            _models[key] = lm
        return lm


class ModelSource:
    """A model that is loaded when it is first needed, or is loaded already.

    Configuration and tokenizer can be had before, from the model's files; what is not found is a
    `ModelLoadError`. Copies, deep ones too, share the model.

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
                tokenizer = self._own_tokenizer
                given = {} if tokenizer is None else {"tokenizer": tokenizer}
                self._lm = load_shared(cast(Any, self.model), **self._arguments, **given)
            return self._lm

    def config(self) -> PreTrainedConfig:
        """The model's configuration, without the weights where they are not loaded yet."""
        if isinstance(self.model, PreTrainedModel):
            return self.model.config
        if self._lm is not None or self.model is None:
            return self.lm().model.config
        config: PreTrainedConfig = _read(loading.load_config, *self._files())
        return config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, read without the weights where these are not loaded yet."""
        tokenizer = self._own_tokenizer if self._lm is None else self._lm.tokenizer
        if tokenizer is None and self._lm is None and self.by_name:
            tokenizer = _read(loading.load_tokenizer, *self._files())
        if tokenizer is None:
            raise ModelLoadError("The model has no tokenizer. Give one as tokenizer=.")
        return tokenizer

    def template_kwargs(self) -> Mapping[str, Any]:
        """Further variables of the chat template."""
        if self._lm is not None:
            return self._lm.template_kwargs
        return dict(self._arguments.get("template_kwargs") or {})

    def reasons(self) -> bool:
        """Whether answers may hold reasoning, which then stands beside their text."""
        return ReasoningFormat.of(self.tokenizer(), self.template_kwargs()) is not None

    def tool_format(self) -> ToolFormat | None:
        """How the chat template writes calls of tools; None where it has none that can be read."""
        try:
            return ToolFormat.of(self.tokenizer(), self.template_kwargs())
        except ToolsUnsupportedError:
            return None

    def _files(self) -> tuple[str, tuple[tuple[str, Any], ...], Hashable]:
        """The model's name, options that say which of its files are read, and their state."""
        names = ("revision", "token", "cache_dir", "gguf_file", "local_files_only")
        options = [(name, self._arguments[name]) for name in names if name in self._arguments]
        return str(self.model), tuple(options), folder_state(str(self.model))

    @cached_property
    def _own_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The one that was asked for; None for the model's."""
        if isinstance(self._tokenizer, PreTrainedTokenizerBase):
            return self._tokenizer
        if self._tokenizer is None and not self._tokenizer_kwargs:
            return None
        if self._tokenizer is None and not self.by_name:
            raise InputError(
                "tokenizer_kwargs need tokenizer_name= when model= is a loaded model. "
                "Give it, or leave tokenizer_kwargs out."
            )
        return loading.load_tokenizer(str(self._tokenizer or self.model), **self._tokenizer_kwargs)


@lru_cache(maxsize=8)
def _read(
    load: Callable[..., Any], model: str, options: tuple[tuple[str, Any], ...], state: Hashable
) -> Any:
    """What is loaded of a model's files, once for each state of these."""
    return load(model, **dict(options))
