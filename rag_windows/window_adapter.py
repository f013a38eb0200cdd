"""An adapter with which a model writes windows: active while those are encoded, nowhere else.

Its folder is PEFT's, with one more file that says for what tokens it was made. The prefix, the
question and the answer are read with the model's own weights, as is a question without passages.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel
from transformers.utils import cached_file

from rag_windows.attention.mirror import ModelMirror
from rag_windows.errors import MethodError, ModelLoadError, UnsupportedModelError, require
from rag_windows.loading import adapted_model, embedded_path
from rag_windows.methods import resolve
from rag_windows.packed_weights import Int8Linear
from rag_windows.prefill import ModelEncoder

if TYPE_CHECKING:
    from peft import PeftModel

CONFIG_NAME, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILE = "window_adapter.json"
"""In an adapter's folder: that it is for windows, and what it was made with."""


class Made(BaseModel):
    """What the file says.

    Attributes:
        format: of this file.
        method: by which the adapted windows are read.
        model: name and fingerprint of the base model; see `calibration.ModelFingerprint`.
        trained: how it was trained, for people to read.
    """

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    method: str = "pcw"
    model: dict[str, str] | None = None
    trained: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class WindowAdapter:
    """A folder or Hub name, its base model, and what its file says."""

    source: str
    base: str
    made: Made
    hub: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def find(cls, source: str | Path, **hub: Any) -> WindowAdapter | None:
        """The adapter of a folder or Hub name; None if that is none for windows.

        Args:
            hub: revision, token, cache_dir, local_files_only.

        Raises:
            ModelLoadError: its file can't be used.
        """
        source = os.path.expanduser(source)
        # Nobody else's models of these names are asked for, and a file is no folder.
        if embedded_path(source) is not None or os.path.isfile(source):
            return None
        quiet = {
            f"_raise_exceptions_for_{what}": False
            for what in ("gated_repo", "missing_entries", "connection_errors")
        }
        try:
            path = cached_file(source, FILE, **hub, **quiet)
            config = cached_file(source, CONFIG_NAME, **hub, **quiet)
        except OSError:  # no such folder or name, which loading the model explains better
            return None
        if path is None or config is None:
            return None
        try:
            base = str(json.loads(Path(config).read_bytes())["base_model_name_or_path"])
            made = Made.model_validate_json(Path(path).read_bytes())
            resolve(made.method)
        except (OSError, ValueError, KeyError, TypeError, MethodError) as error:
            raise ModelLoadError(
                f"The adapter {source!r} can't be used: {error}. Write it again with "
                "rag-windows adapt."
            ) from error
        if made.format != 1:
            raise ModelLoadError(
                f"{path} has format {made.format}, which this version does not know. Update "
                "rag-windows."
            )
        return cls(source, base, made, hub)

    @classmethod
    def of(cls, adapter: str | Path | WindowAdapter) -> WindowAdapter:
        """The adapter itself, or that of a folder or Hub name.

        Raises:
            ModelLoadError: there is none for windows.
        """
        if isinstance(adapter, WindowAdapter):
            return adapter
        found = cls.find(adapter)
        if found is None:
            raise ModelLoadError(
                f"{str(adapter)!r} holds no adapter for windows: it has no {FILE}. Name the folder "
                "that rag-windows adapt wrote. Give any other PEFT adapter as the model."
            )
        return found

    def encoder(self, model: PreTrainedModel, max_batch_tokens: int | None) -> ModelEncoder:
        """What encodes windows with it; ``model`` itself stays as it is.

        Raises:
            ModelLoadError: it was made for another model, or can't be read.
            MissingExtraError: PEFT is not installed.
        """
        require(f"The adapter {self.source!r}", "peft", extra="peft")
        from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

        quiet = {"_raise_exceptions_for_missing_entries": False}
        found = cached_file(self.source, _WEIGHTS, **self.hub, **quiet)
        if found is None:  # a pickle would run code
            raise ModelLoadError(f"The adapter {self.source!r} has no {_WEIGHTS}. Name another.")
        view = view_for_adapter(model)
        try:
            with gradients_unchanged(model):
                adapted = PeftModel.from_pretrained(view, self.source, **self.hub)
            stored = load_peft_weights(self.source, device="cpu", **self.hub)
            if stored.keys() != get_peft_model_state_dict(adapted).keys():
                raise ValueError("its weights are of other layers")
        except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            raise ModelLoadError(
                f"The adapter {self.source!r} can't be used with this model: {error}. Load it with "
                "the model that it was made for."
            ) from error
        made = encoder_of(adapted, max_batch_tokens)
        made.adapter = self.source
        return made


@contextmanager
def gradients_unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Have the weights want gradients behind it if they did before; PEFT switches that off."""
    wanted = [(one, one.requires_grad) for one in model.parameters()]
    try:
        yield
    finally:
        for one, before in wanted:
            one.requires_grad_(before)


def view_for_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """A second tree of modules over the same weights, into which PEFT may put its own.

    Raises:
        UnsupportedModelError: PEFT can't adapt its layers.
    """
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise UnsupportedModelError(
            "An adapter for windows can't stand on weights that quantization='int8' packed. Load "
            "the model without quantization."
        )
    return ModelMirror(model, attention=None).model


def encoder_of(adapted: PeftModel, max_batch_tokens: int | None = None) -> ModelEncoder:
    """What encodes windows with an adapter that is in a view of `view_for_adapter`."""
    return ModelEncoder(ModelMirror(adapted_model(adapted)), max_batch_tokens)


def attach(
    encoder: ModelEncoder,
    model: PreTrainedModel,
    adapter: WindowAdapter,
    max_batch_tokens: int | None,
) -> None:
    """Let an encoder write windows with an adapter.

    Raises:
        UnsupportedModelError: it reads windows in rows.
        ModelLoadError: see `WindowAdapter.encoder`.
    """
    if encoder.form is not None:
        raise UnsupportedModelError(
            "An adapter for windows needs a model whose windows share one attention, and this one "
            "reads each in a row of its own. Load the model without the adapter."
        )
    encoder.make_writer = functools.partial(adapter.encoder, model, max_batch_tokens)
    encoder.of_windows.follow()
