"""Where an LLM's weights come from, and that they are loaded once, when first needed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llama_index.llms.rag_windows.counting import Counting
from rag_windows import WindowedLM
from rag_windows.attention.layers import position_limit
from rag_windows.batching.awaiting import Crowd
from rag_windows.errors import InputError, ModelLoadError, ToolsUnsupportedError
from rag_windows.forks import Lock
from rag_windows.loading import load_config, load_tokenizer
from rag_windows.prompt.tool_calls import ToolFormat
from rag_windows.sharing import load_shared

_HUB = ("revision", "token", "cache_dir", "gguf_file")
"""Loading options that say which files, not how; those for the tokenizer, too."""


class ModelSource:
    """A model by name, or one that is loaded already.

    Copying it, deeply too, shares the weights.

    Args:
        model: name, folder, or a loaded transformers model.
        lm: a loaded `WindowedLM`, instead of ``model`` and all below.
        tokenizer: a loaded one, or a name; None is the model's own.
        tokenizer_kwargs: for loading the tokenizer.
        model_kwargs: for ``AutoModelForCausalLM.from_pretrained``.
        view: how the model is read: header, max_window_tokens, template_kwargs, profile.

    Attributes:
        crowd: of the calls that are under way.

    Raises:
        InputError: none or two models are given, or options for one that is loaded already.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None,
        *,
        lm: WindowedLM | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        view: Mapping[str, Any] | None = None,
    ) -> None:
        if (model is None) == (lm is None):
            raise InputError("Give one of model_name= (or model=) and lm=.")
        loaded = {"tokenizer": tokenizer, "tokenizer_kwargs": tokenizer_kwargs}
        loaded |= {"model_kwargs": model_kwargs, **(view or {})}
        given = sorted(name for name, value in loaded.items() if value)
        if lm is not None and given:
            raise InputError(
                f"{given} apply to a model that is loaded here; set them on the WindowedLM that "
                "you give as lm=."
            )
        self._model = model
        self._lm = lm
        self._tokenizer = tokenizer
        self._tokenizer_kwargs = dict(tokenizer_kwargs or {})
        self._model_kwargs = dict(model_kwargs or {})
        # Its older name in transformers.
        if "torch_dtype" in self._model_kwargs:
            self._model_kwargs.setdefault("dtype", self._model_kwargs.pop("torch_dtype"))
        self._view = {name: value for name, value in (view or {}).items() if value}
        self._lock = Lock()
        self.crowd = Crowd()
        self._limit: tuple[int | None] | None = None
        self._read_tokenizer: PreTrainedTokenizerBase | None = None
        self._tools: tuple[ToolFormat | None] | None = None
        self._counting: Counting | None = None

    def __copy__(self) -> ModelSource:
        return self

    def __deepcopy__(self, memo: object) -> ModelSource:
        return self

    def __reduce__(self) -> Any:
        # An LLM that is read from a pickle makes its source anew, from its own fields.
        raise InputError(
            "A loaded model is not pickled with its LLM. Make the LLM by model_name= instead."
        )

    @property
    def by_name(self) -> bool:
        """Whether the weights can be loaded again by name."""
        return isinstance(self._model, str | Path)

    @property
    def name(self) -> str:
        """The model's name, as far as it has one."""
        model = self._lm.model if self._lm is not None else self._model
        if isinstance(model, PreTrainedModel):
            return str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        return str(model)

    @property
    def loaded(self) -> bool:
        """Whether the weights are there."""
        return self._lm is not None

    def lm(self) -> WindowedLM:
        """The model, loaded now if it is not yet; threads that ask at once wait for one load.

        Raises:
            ModelLoadError: not found, or can't be loaded.
            UnsupportedModelError: its attention can't be split into windows.
        """
        with self._lock:
            if self._lm is None:
                if self._model is None:
                    raise ModelLoadError("There is no model to load; give model_name=.")
                options = {**self._model_kwargs, **self._view}
                tokenizer = self._load_tokenizer()
                if tokenizer is not None:
                    options["tokenizer"] = tokenizer
                self._lm = load_shared(self._model, **options)
            return self._lm

    def position_limit(self) -> int | None:
        """Positions of the model, from its configuration alone; None where that names no limit.

        Raises:
            ModelLoadError: no configuration was found.
        """
        if self._limit is None:
            if isinstance(self._model, PreTrainedModel):
                config = self._model.config
            elif self._lm is not None:
                config = self._lm.model.config
            else:
                config = load_config(str(self._model), **self._model_kwargs)
            self._limit = (position_limit(config),)
        return self._limit[0]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, read without the weights where these are not loaded yet.

        Raises:
            ModelLoadError: not found, or the engine was given none.
        """
        if self._lm is None and self.by_name:
            if self._read_tokenizer is None:
                hub = {key: self._model_kwargs[key] for key in _HUB if key in self._model_kwargs}
                with suppress(ModelLoadError):  # it may be found with the weights, or not at all
                    self._read_tokenizer = self._load_tokenizer() or load_tokenizer(
                        str(self._model), **hub
                    )
            if self._read_tokenizer is not None:
                return self._read_tokenizer
        tokenizer = self.lm().tokenizer
        if tokenizer is None:
            raise ModelLoadError("The model has no tokenizer; give it as tokenizer=.")
        return tokenizer

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Further variables of the chat template."""
        if self._lm is not None:
            return self._lm.template_kwargs
        return dict(self._view.get("template_kwargs") or {})

    def counting(self) -> Counting:
        """How the model's tokens compare with LlamaIndex's.

        Raises:
            ModelLoadError: no tokenizer was found.
        """
        if self._counting is None:
            self._counting = Counting(self.tokenizer(), self.template_kwargs)
        return self._counting

    def tool_format(self) -> ToolFormat | None:
        """How the chat template writes calls of tools; None where it has none that can be read.

        Raises:
            ModelLoadError: no tokenizer was found.
        """
        if self._tools is None:
            try:
                self._tools = (ToolFormat.of(self.tokenizer(), self.template_kwargs),)
            except ToolsUnsupportedError:
                self._tools = (None,)
        return self._tools[0]

    def _load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        tokenizer = self._tokenizer
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            return tokenizer
        if tokenizer is None and not self._tokenizer_kwargs:
            return None
        if tokenizer is None and not self.by_name:
            raise InputError("tokenizer_kwargs need tokenizer_name= beside a loaded model=.")
        return load_tokenizer(str(tokenizer or self._model), **self._tokenizer_kwargs)
