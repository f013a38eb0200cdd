"""Where an LLM's weights come from, and the calls of them that are under way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llama_index.llms.rag_windows.counting import Counting
from rag_windows import WindowedLM
from rag_windows.errors import InputError
from rag_windows.integration import Calls, ModelSource


class Source(ModelSource):
    """A model by name, or one that is loaded already.

    Args:
        model: name, folder, or a loaded transformers model.
        lm: a loaded `WindowedLM`, instead of ``model`` and all below.
        rows: so many calls are answered together; 1 for each by itself.
        tokenizer: a loaded one, or a name; None is the model's own.
        tokenizer_kwargs: for loading the tokenizer.
        model_kwargs: for ``AutoModelForCausalLM.from_pretrained``.
        view: how the model is read: header, max_window_tokens, template_kwargs, profile.

    Attributes:
        calls: that are under way.

    Raises:
        InputError: none or two models are given, or options for one that is loaded already.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None,
        *,
        lm: WindowedLM | None = None,
        rows: int,
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
        arguments = dict(model_kwargs or {})
        # Its older name in transformers.
        if "torch_dtype" in arguments:
            arguments.setdefault("dtype", arguments.pop("torch_dtype"))
        arguments |= {name: value for name, value in (view or {}).items() if value}
        super().__init__(
            model, lm=lm, tokenizer=tokenizer, tokenizer_kwargs=tokenizer_kwargs, **arguments
        )
        self.calls = Calls(rows)
        self._counting: Counting | None = None

    def __reduce__(self) -> Any:
        # An LLM that is read from a pickle makes its source anew, from its own fields.
        raise InputError(
            "A loaded model is not pickled with its LLM. Make the LLM by model_name= instead."
        )

    def counting(self) -> Counting:
        """How the model's tokens compare with LlamaIndex's.

        Raises:
            ModelLoadError: no tokenizer was found.
        """
        if self._counting is None:
            self._counting = Counting(self.tokenizer(), self.template_kwargs())
        return self._counting
