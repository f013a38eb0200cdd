"""Models, tokenizers and where they go."""

from __future__ import annotations

import contextvars
import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import CONFIG_NAME, find_adapter_config_file
from transformers.utils import logging as transformers_logging

from rag_windows import gguf_loading, packed_weights
from rag_windows.errors import (
    InputError,
    ModelLoadError,
    RagWindowsError,
    UnsupportedModelError,
    installed,
    require,
)

T = TypeVar("T")


def best_device() -> str:
    """What ``device_map`` is unless it is given: "cpu", "cuda", or "auto" for several of them."""
    count = _cuda_devices()
    return "cpu" if count == 0 else "cuda" if count == 1 else "auto"


def check_device(asked: Any, argument: str = "device_map=") -> None:
    """Refuse a CUDA device that is not there; ``asked`` is a ``device_map`` of any form."""
    for device in asked.values() if isinstance(asked, Mapping) else [asked]:
        name = f"cuda:{device}" if isinstance(device, int) else str(device)
        if name.partition(":")[0] != "cuda":
            continue
        number = name.partition(":")[2]
        count = _cuda_devices()
        if (number and not number.isdecimal()) or int(number or 0) >= count:
            there = f"PyTorch sees {count} CUDA devices" if count else "PyTorch sees no CUDA device"
            raise InputError(
                f"{argument}{asked} can't be used: {there}. Use cpu, or leave it out for the best "
                "device."
            )


def autocast_here() -> list[torch.autocast]:
    """The autocast of this thread, for another one to enter."""
    kinds = [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]
    return [torch.autocast(kind, dtype=torch.get_autocast_dtype(kind)) for kind in kinds]


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that token ids go to.

    Weights that accelerate keeps offloaded stand on the meta device between calls; only
    its hooks know the device that they are computed on.
    """
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "cpu"))


def layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """Where the attention of each of the text decoder's layers is computed."""
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    found = [input_device(model)] * layers
    for module in model.modules():
        index = module.__dict__.get("layer_idx")
        if not isinstance(index, int) or not 0 <= index < layers:
            continue
        weight = next(module.parameters(), None)
        placed_on = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if weight is not None and weight.device.type != "meta":
            found[index] = weight.device
        elif placed_on is not None:
            named = ("cuda", placed_on) if isinstance(placed_on, int) else (placed_on,)
            found[index] = torch.device(*named)
    return found


EMBEDDED = ("tiny-reader",)
"""Models that are shipped with the package."""

IN_REPOSITORY = ("tiny-learner",)
"""Models of the repository that the package leaves out; in a clone their names load them, too."""

SEVERAL = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of ``device_map`` by which accelerate spreads a model."""

_QUANTIZATION = ("load_in_", "bnb_4bit_", "llm_int8_")
"""How arguments of BitsAndBytesConfig begin."""


def embedded_path(name: str) -> Path | None:
    """Folder of one of our own models; None for any other name.

    Raises:
        ModelLoadError: the model is in the repository, and this is no clone of it.
    """
    package = Path(str(resources.files("rag_windows")))
    if name in EMBEDDED:
        return package / "models" / name
    # The user's own folder of that name goes first.
    if name not in IN_REPOSITORY or Path(name).exists():
        return None
    folder = package.parent / "training" / "models" / name
    if not folder.is_dir():
        raise ModelLoadError(
            f"The package does not contain the model {name}. It is in the folder "
            f"training/models/{name} of https://github.com/rag-windows/rag-windows: clone the "
            "repository and give that folder, or name another model."
        )
    return folder


def resolve(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
    *,
    dtype: str | torch.dtype,
    device_map: Any,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A loaded model as it is, or one loaded by name, in evaluation mode; errors as in `load`."""
    if not isinstance(model, PreTrainedModel) and hasattr(model, "peft_config"):
        model = adapted_model(model)
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    if isinstance(model, PreTrainedModel):
        if model_kwargs or device_map is not None or dtype != "auto":
            raise InputError(
                "dtype, device_map and model options have no effect on a model that is loaded "
                "already. Leave them out, or give the model by name."
            )
        return model, tokenizer
    if not isinstance(model, str | Path):
        raise InputError(
            "model must be a name, a folder or a transformers PreTrainedModel, not "
            f"{type(model).__name__}. If torch.compile() made it, give the model from before."
        )
    loaded, tokenizer = load(model, tokenizer, dtype=dtype, device_map=device_map, **model_kwargs)
    return loaded.eval(), tokenizer


def adapted_model(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT model, with the adapters' modules in it."""
    for config in model.peft_config.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if (
            config.is_prompt_learning
            or kind in ("XLORA", "ADAPTION_PROMPT")
            or getattr(config, "alora_invocation_tokens", None)
        ):
            raise UnsupportedModelError(
                f"A PEFT adapter of type {kind} changes prompts or single tokens, so windows "
                "can't be encoded on their own. Use an adapter that changes weights, such as "
                "LoRA, or load the model without it."
            )
    return model.get_base_model()


def load(
    model: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    device_map: Any = None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load by shipped name, local folder, GGUF file or Hub name.

    Weights come from safetensors or GGUF only, and no code of a repository is run. The folder of
    a PEFT adapter brings its base model and, if it has none of its own, the base's tokenizer.
    Arguments and errors are those of `WindowedLM.from_pretrained`.
    """
    _refuse_remote_code(kwargs, "model", "to from_pretrained")
    source, kwargs = _located(model, kwargs)
    place, moved = _placed(device_map)
    int8 = _packed(kwargs.pop("quantization", None), kwargs, device_map)
    dtype = kwargs.get("dtype", "auto")
    if isinstance(dtype, str) and dtype != "auto" and not hasattr(torch, dtype):
        raise ModelLoadError(
            f"dtype={dtype!r} is unknown. Use 'auto', 'float32', 'bfloat16' or 'float16'."
        )
    with _explained(model), gguf_loading.reading(kwargs, int8=int8):
        base = _base_of(source, kwargs)
        if int8 and base is not None:
            raise InputError(
                "The option quantization can't be combined with an adapter. Leave it out, or merge "
                "the adapter into its model first."
            )
        if tokenizer is None:
            tokenizer = _tokenizer(source, base, hub_options(kwargs))
        with _one_at_a_time, late_bars():
            loaded = AutoModelForCausalLM.from_pretrained(
                source, use_safetensors=True, **place, **_quantized(_unpacked(source, kwargs))
            )
        if moved is not None:
            loaded = loaded.to(moved)
    if int8:
        packed_weights.pack(loaded)
    return loaded, tokenizer


_one_at_a_time = threading.Lock()
"""transformers changes torch for the whole process while it loads: another model that is made or
loaded meanwhile would keep weights that nobody has set."""


def load_config(model: str | Path, **kwargs: Any) -> PreTrainedConfig:
    """Only a model's configuration, no weights; arguments and errors as in `load`."""
    source, kwargs = _located(model, kwargs)
    with _explained(model), gguf_loading.reading(kwargs):
        return AutoConfig.from_pretrained(_base_of(source, kwargs) or source, **hub_options(kwargs))


def load_tokenizer(name: str | Path, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Only a tokenizer, with options of its own; adapters, GGUF files and errors as in `load`."""
    _refuse_remote_code(kwargs, "tokenizer", "as tokenizer=")
    source, kwargs = _located(name, kwargs, whole=False)
    with _explained(name), gguf_loading.reading(kwargs):
        return _tokenizer(source, _base_of(source, kwargs), kwargs)


_LOADING = OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AssertionError
"""What transformers and PyTorch raise for a model that can't be loaded."""


@contextmanager
def _explained(name: str | Path) -> Iterator[None]:
    """Say why something can't be loaded, and what to do."""
    try:
        yield
    except RagWindowsError:
        raise
    except _LOADING as error:
        raise ModelLoadError(_explain(str(name), error)) from error


def _refuse_remote_code(kwargs: Mapping[str, Any], what: str, handed: str) -> None:
    if kwargs.get("trust_remote_code"):
        raise ModelLoadError(
            f"trust_remote_code=True is refused, because it runs code from the {what}'s "
            f"repository. If you trust that code, load the {what} yourself and pass the object "
            f"{handed}."
        )


def hub_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments those that say what is fetched from the Hub, and how."""
    names = ("revision", "token", "cache_dir", "gguf_file", "local_files_only")
    return {key: kwargs[key] for key in names if kwargs.get(key) is not None}


def _located(
    model: str | Path, kwargs: dict[str, Any], *, whole: bool = True
) -> tuple[str, dict[str, Any]]:
    """Where transformers looks, and the options with which it finds a GGUF file there."""
    source = embedded_path(str(model)) or Path(model)
    if source.suffix == ".gguf" and source.is_file():
        kwargs = {**kwargs, "gguf_file": source.name}
        source = source.parent
    if kwargs.get("gguf_file") is None:
        if whole:
            _check_path(str(model), source)
    else:
        require("Loading a GGUF file", "gguf", extra="gguf")
    return str(source) if source.exists() else str(model), kwargs


def _base_of(source: str, kwargs: Mapping[str, Any]) -> str | None:
    """Name or folder of the base model, if the source is a PEFT adapter."""
    if kwargs.get("gguf_file") is not None or os.path.isfile(os.path.join(source, CONFIG_NAME)):
        return None
    found = find_adapter_config_file(source, **hub_options(kwargs))
    if found is None or (Path(found).parent / CONFIG_NAME).is_file():
        return None
    require(f"The adapter {source!r}", "peft", extra="peft")
    return str(json.loads(Path(found).read_text(encoding="utf-8"))["base_model_name_or_path"])


def _tokenizer(source: str, base: str | None, hub: dict[str, Any]) -> PreTrainedTokenizerBase:
    """An adapter's own tokenizer, or its base model's; any other model's own."""
    if base is None:
        return AutoTokenizer.from_pretrained(source, **hub)
    try:
        return AutoTokenizer.from_pretrained(source, **hub)
    except (OSError, ValueError, KeyError):
        # The revision is the adapter's.
        return AutoTokenizer.from_pretrained(
            base, **{key: value for key, value in hub.items() if key != "revision"}
        )


def _placed(device_map: Any) -> tuple[dict[str, Any], Any]:
    """The argument that places the weights, and the device to move them to after loading.

    Without accelerate, transformers takes no ``device_map``; one device is reached all the same.
    """
    best = best_device()
    asked = best if device_map is None else device_map
    check_device(asked)
    if str(asked) == best == "cpu":
        return {}, None
    if installed("accelerate"):
        return {"device_map": asked}, None
    if isinstance(device_map, Mapping) or (isinstance(device_map, str) and device_map in SEVERAL):
        require(f"device_map={device_map!r}", "accelerate", extra="cuda")
    # Without accelerate there is one device only, so the best is the first.
    return {}, "cuda" if device_map is None else device_map


QUANTIZATIONS = ("int8",)
"""Forms in which weights are packed here; transformers has others, as ``quantization_config``."""


def _packed(asked: str | None, kwargs: Mapping[str, Any], device_map: Any) -> bool:
    """Whether weights are to be packed to 8 bits."""
    if asked is None:
        return False
    if asked not in QUANTIZATIONS:
        raise InputError(
            f"quantization must be one of {list(QUANTIZATIONS)}, not {asked!r}. Give any other "
            "form as quantization_config."
        )
    others = [name for name in kwargs if name.startswith(_QUANTIZATION)]
    others += [name for name in ("quantization_config", "dequantize") if kwargs.get(name)]
    if others:
        raise InputError(
            f"The option quantization can't be combined with {', '.join(sorted(others))}. Leave "
            "one out."
        )
    device = best_device() if device_map is None else device_map
    if str(device) != "cpu":
        raise InputError(
            f"quantization={asked!r} is for CPUs, not for the device {device}. Give "
            'device_map="cpu", or load_in_8bit=True instead.'
        )
    return True


def _quantized(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments, those of BitsAndBytesConfig gathered where transformers takes them."""
    gathered = {key: kwargs[key] for key in kwargs if key.startswith(_QUANTIZATION)}
    if not gathered:
        return kwargs
    if kwargs.get("quantization_config") is not None:
        raise InputError(
            f"{', '.join(sorted(gathered))} can't be combined with quantization_config. Put "
            "everything into quantization_config."
        )
    rest = {key: value for key, value in kwargs.items() if key not in gathered}
    return {**rest, "quantization_config": {"quant_method": "bitsandbytes", **gathered}}


def _unpacked(source: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments, ``dequantize`` as transformers takes it."""
    if not kwargs.get("dequantize"):
        return {name: value for name, value in kwargs.items() if name != "dequantize"}
    if kwargs.get("gguf_file") is None:
        raise InputError(
            f"The option dequantize unpacks the blocks of a GGUF file, and {source!r} is none. "
            "Leave it out, or name a GGUF file."
        )
    if kwargs.get("quantization_config") is not None:
        raise InputError(
            "The option dequantize can't be combined with quantization_config. Put everything into "
            "quantization_config."
        )
    rest = {name: value for name, value in kwargs.items() if name != "dequantize"}
    return {**rest, "quantization_config": GgufConfig(dequantize=True)}


_LATE_S = 5.0
"""Seconds after which a bar says how far transformers is with loading."""


@contextmanager
def late_bars() -> Iterator[None]:
    """Let transformers draw bars where loading takes long; whoever draws them itself goes on."""

    def late(factory: Any, args: Any, settings: Any) -> Any:
        return factory(*args, **{"delay": _LATE_S, **settings})

    before = transformers_logging.set_tqdm_hook(None)
    transformers_logging.set_tqdm_hook(before or late)
    # Only the loader of GGUF files takes its bar from elsewhere, where no hook sees it.
    gguf_loader: Any = modeling_gguf_pytorch_utils
    unseen = gguf_loader.tqdm
    gguf_loader.tqdm = transformers_logging.tqdm
    try:
        yield
    finally:
        gguf_loader.tqdm = unseen
        transformers_logging.set_tqdm_hook(before)


def _check_path(name: str, path: Path) -> None:
    known = ("config.json", "adapter_config.json")
    if path.is_dir() and not any((path / file).is_file() for file in known):
        raise ModelLoadError(
            f"The folder {name!r} holds no config.json. Give the folder that save_pretrained "
            "made, or name a GGUF file in it with gguf_file=."
        )
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_local and not path.exists():
        raise ModelLoadError(f"The model folder {name!r} does not exist. Check the path.")


def _explain(name: str, error: Exception) -> str:
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    lowered = text.lower()
    if "gated repo" in lowered:
        return (
            f"Model {name!r} is gated: {' '.join(text.split())} Ask for access on that page. Then "
            "log in with `hf auth login`, or pass token=."
        )
    if "safetensors" in lowered and isinstance(error, OSError):
        return (
            f"Model {name!r} has no safetensors weights ({first}). Pickled weights are never "
            "loaded. Load the model with transformers and write it with save_pretrained."
        )
    offline = ("connection", "couldn't connect", "offline", "resolve", "timed out", "can't load")
    if isinstance(error, OSError) and any(word in lowered for word in offline):
        return (
            f"Model {name!r} is neither a local folder nor in the local cache, and the model hub "
            "can't be reached or does not know it. Check the name and the network, or give a "
            f"local folder. The shipped model is {EMBEDDED[0]}. For a private model, "
            "log in with `hf auth login`, or pass token=."
        )
    if "Unrecognized configuration class" in text:
        return (
            f"Model {name!r} is not a causal language model: transformers has no "
            "AutoModelForCausalLM for its type. Choose a decoder-only model."
        )
    return f"Model {name!r} can't be loaded: {first}"


def in_a_thread(work: Callable[[], T], name: str) -> T:
    """The result of a call in a thread that ends with it; what it raises is raised here.

    For loading a model. OpenMP keeps a team of threads for each thread that ever computed, and
    where a process has more of them than processors, they stop waiting actively: a decode step in
    another thread then takes 1.4 times as long. So whoever loads leaves no team behind.

    The default device, the current GPU and the caller's context variables hold there, too. An
    interruption of the wait interrupts the work.
    """
    context, device = contextvars.copy_context(), torch.get_default_device()
    # Each thread has a current GPU of its own; asking for it would begin to use one.
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    working: list[int] = []

    def there() -> T:
        working.append(threading.get_ident())
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            with nullcontext() if device.type == "cpu" else device:
                return context.run(work)
        finally:
            working.clear()

    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        try:
            done = pool.submit(there)
            # A signal that comes just before a wait doesn't end it: so no wait is long.
            while not wait([done], timeout=1).done:
                pass
            return done.result()
        except KeyboardInterrupt:
            for thread in [*working]:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt)
                )
            raise
