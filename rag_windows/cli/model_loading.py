"""The model of a command: its options, and the loading of it."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from rag_windows.cli.options import (
    INSTRUCTION,
    CacheDir,
    Device,
    Shared,
    Verbose,
    count,
    flag,
    option,
)
from rag_windows.cli.render import progress, tell
from rag_windows.errors import CacheError, InputError, MethodError

if TYPE_CHECKING:
    from rag_windows import Method, PassageCache, WindowedLM


DEFAULT_MODEL = "tiny-reader"
SAMPLE_MODEL = (
    f"The shipped model {DEFAULT_MODEL} answers; it knows only the sample corpus. For documents of "
    "your own, name them with --docs and a model with --model."
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is loaded, and how; each annotated field is the option of its name."""

    model: Annotated[
        str | None,
        option(
            "MODEL",
            "A local folder or a name on the Hub. Default, without --docs and --index: the shipped "
            "tiny-reader, which can answer over the sample corpus only.",
            envvar="RAG_WINDOWS_MODEL",
        ),
    ] = None
    method: Annotated[
        str | None,
        option(
            "NAME",
            "Method that reads the passages, such as ape:scale=0.9; rag-windows methods "
            "lists them. Default: auto.",
        ),
    ] = None
    profile: Annotated[str | None, option("FILE", "Profile that rag-windows compare wrote.")] = None
    rag_temperature: Annotated[
        float | None, option("T", "The same as --method ape:temperature=T.")
    ] = None
    rag_scale: Annotated[float | None, option("S", "The same as --method ape:scale=S.")] = None
    device: Device = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option(None, "Number format of the weights."),
    ] = "auto"
    dequantize: Annotated[
        bool,
        flag(
            "--dequantize",
            "Unpack the weights of a GGUF file where transformers would keep them packed.",
        ),
    ] = False
    quantization: Annotated[
        Literal["int8"] | None,
        option(None, "Pack the weights into 8 bits each, on a CPU: half the memory of bfloat16."),
    ] = None
    max_window_tokens: Annotated[
        int | None, count("Split longer passages into several windows of at most N tokens.")
    ] = None
    template_option: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Variable of the model's chat template, such as enable_thinking=false; can be "
            "repeated.",
        ),
    ] = None
    cache_dir: CacheDir = None
    shared: Shared = None
    shared_wait: Annotated[
        float | None,
        option(
            "SECONDS",
            "Longest wait of a request for the shared store. Default: as long as encoding takes.",
        ),
    ] = None
    shared_apart: Annotated[
        bool,
        flag("--shared-apart", "Give each tenant a folder of its own in the shared store."),
    ] = False
    no_cache: Annotated[
        bool,
        flag(
            "--no-cache",
            "Neither read nor write the passage cache, and keep no index of --docs in its folder.",
        ),
    ] = False
    verbose: Verbose = False
    cache_memory: str | None = None
    """Size of a cache that is in memory only, in place of the one on disk."""

    @property
    def name(self) -> str:
        """The model's name or folder."""
        return self.model or DEFAULT_MODEL

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template.

        Raises:
            InputError: one without a value, or given twice.
        """
        variables: dict[str, Any] = {}
        for one in self.template_option or ():
            name, equals, value = one.partition("=")
            if not equals or not name.isidentifier():
                raise InputError(
                    f"--template-option {one!r} must be a name and a value, such as "
                    "enable_thinking=false."
                )
            if name in variables:
                raise InputError(f"--template-option {name} is given twice. Leave one of them out.")
            try:
                # Python's True and False are what many would write.
                variables[name] = json.loads(value.lower() if value in ("True", "False") else value)
            except ValueError:
                variables[name] = value
        return variables

    def check(self, link_tokens: Any = None, link_choose: Any = "first") -> None:
        """Refuse what is wrong with method, profile and device, before documents are read.

        The arguments are the values of --link-tokens and --link-choose.
        """
        from rag_windows.methods import Auto, linked

        method = method_of(self)
        linked(method or Auto(), link_tokens, link_choose)
        if self.profile is None and self.device in ("auto", "cpu"):
            return
        # What follows imports torch.
        quieten(self.verbose)
        with nullcontext() if self.verbose else progress("Checking the options"):
            _import_libraries(self)
            from rag_windows.calibration import Profile
            from rag_windows.loading import check_device

            check_device(self.device, "--device ")
            if self.profile is not None:
                found = Profile.load(self.profile).method
                linked(method or found, link_tokens, link_choose)


@contextmanager
def loaded_model(model: LoadOptions) -> Iterator[WindowedLM]:
    """The model on its device; at the end, what was encoded is written into its cache."""
    quieten(model.verbose)
    with nullcontext() if model.verbose else progress(f"Loading {model.name}"):
        _import_libraries(model)
        from rag_windows import WindowedLM
        from rag_windows.calibration import Profile
        from rag_windows.loading import check_device
        from rag_windows.prompt.conversation import knows_variable

        profile = None if model.profile is None else Profile.load(model.profile)
        method, variables = method_of(model), model.template_kwargs
        check_device(model.device, "--device ")
        if model.name != DEFAULT_MODEL and not os.path.exists(model.name):
            _notice_missing_network()
    # Once more: some set levels of their own when they are imported.
    quieten(model.verbose)
    # What takes long from here on is shown by bars of the hub and of transformers.
    lm = WindowedLM.from_pretrained(
        model.name,
        dtype=model.dtype,
        dequantize=model.dequantize,
        quantization=model.quantization,
        device_map=None if model.device == "auto" else model.device,
        method=method,
        profile=profile,
        max_window_tokens=model.max_window_tokens,
        template_kwargs=variables,
        cache=_cache(model),
    )
    if lm.cache is not None:
        # Else the first question would wait until the weights are read for the cache.
        with suppress(InputError), progress(f"Loading {model.name}"):
            lm.fingerprints()
    for name in variables:
        if not knows_variable(lm.tokenizer, variables, name):
            raise InputError(
                f"--template-option {name}: the chat template of {model.name} has no such "
                "variable. Leave it out, or correct its name."
            )
    if profile is not None and (mismatch := profile.model.mismatch(lm.model)):
        tell(f"Note: {mismatch}")
    try:
        yield lm
    finally:
        if lm.cache is not None:
            with progress("Writing the passage cache"):
                lm.cache.close()


def _import_libraries(model: LoadOptions) -> None:
    """Import what models need: 3,000 modules, which would take a third longer with collections.

    What they hold lives as long as the process, so later collections do not look at it.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch

        on_cpu = model.device == "cpu" or not torch.cuda.is_available()
        if model.name == DEFAULT_MODEL and model.dtype == "auto" and on_cpu:
            _compile_ahead()
        importlib.import_module("rag_windows.model")
    finally:
        gc.freeze()
        gc.enable()


def _compile_ahead() -> None:
    """Have the sample model's C kernels compiled meanwhile: an import keeps one core busy."""
    import torch

    from rag_windows.attention.native import kernel, linear

    folder = resources.files("rag_windows") / "models" / DEFAULT_MODEL
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype, dim = getattr(torch, config["dtype"]), config["head_dim"]
    threading.Thread(target=kernel.kernel, args=(dtype, dim, dim)).start()
    threading.Thread(target=linear.kernel, args=(dtype,)).start()


def method_of(model: LoadOptions) -> Method | None:
    """The method that the options name; None to use the profile's, or the model's own."""
    from rag_windows.methods import resolve
    from rag_windows.methods.registry import with_parameters

    given = {"temperature": model.rag_temperature, "scale": model.rag_scale}
    numbers = {name: value for name, value in given.items() if value is not None}
    if model.profile is not None and model.method is None:
        if numbers:
            raise InputError(
                "--profile sets the method's numbers already. Leave out --rag-temperature and "
                "--rag-scale, or also give --method, which replaces the profile's method."
            )
        return None
    if model.method is None and not numbers:
        return None
    named = model.method or "ape"
    if twice := [name for name in numbers if f"{name}=" in named]:
        raise MethodError(
            f"--rag-{twice[0]} and --method {named} set the same number. Leave one of them out."
        )
    return with_parameters(resolve(named), numbers)


def quieten(verbose: bool) -> None:
    """Silence the libraries' logs and warnings; before their import, which may warn as well."""
    if verbose:
        return
    warnings.simplefilter("ignore")
    for name in ("transformers", "huggingface_hub", "accelerate", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _cache(model: LoadOptions) -> PassageCache | None:
    from rag_windows import PassageCache

    if model.no_cache:
        return None
    names = ("shared", "shared_wait", "shared_apart")
    store: dict[str, Any] = {name: getattr(model, name) for name in names}
    if model.cache_memory is not None:
        return PassageCache(memory=model.cache_memory, **store)
    try:
        return PassageCache.default(model.cache_dir, **store)
    except CacheError as error:
        if model.cache_dir is not None or model.shared is not None:
            raise
        # An answer needs no cache: where the platform's folder can't be used, there is none.
        tell(f"Note: Passages are not cached. {error}")
        return None


def _notice_missing_network() -> None:
    """Without a way to the hub, look only into the local cache: its client retries for a minute."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname, port), timeout=5.0).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def instruction(system: str | None, model: str, lm: WindowedLM) -> str | None:
    """What is sent as the system prompt: what the user gave, else the default; "" is none."""
    if system is not None:
        return system or None
    own = default_instruction(model)
    return None if own is None else lm.behind_own_system(own)


def default_instruction(model: str) -> str | None:
    """`INSTRUCTION`, which stands behind the chat template's own system message, or none.

    The small models of this project were trained without one and know few of its words.
    """
    from rag_windows.loading import EMBEDDED, IN_REPOSITORY

    return None if Path(model).name in (*EMBEDDED, *IN_REPOSITORY) else INSTRUCTION
