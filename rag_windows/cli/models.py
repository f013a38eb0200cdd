"""From the command line's options to a loaded model with its method and passage cache."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit
from urllib.request import getproxies

from rag_windows.cli import options
from rag_windows.cli.errors import tell
from rag_windows.cli.options import flag, option
from rag_windows.cli.render import progress
from rag_windows.errors import CacheError, InputError, MethodError

if TYPE_CHECKING:
    from rag_windows import PassageCache, WindowedLM

DEFAULT_MODEL, DEFAULT_METHOD = "tiny-reader", "ape"
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What is loaded, and how; each field is the option of its name.

    Attributes:
        cache_memory: size of a cache in memory alone, in place of the one on disk; no option.
    """

    model: Annotated[
        str | None,
        option(
            "MODEL",
            "A local folder or a name on the Hub. Default, without --docs: the shipped "
            "tiny-reader, which knows the sample corpus alone.",
            envvar="RAG_WINDOWS_MODEL",
        ),
    ] = None
    method: Annotated[
        str | None,
        option(
            "NAME",
            "How windows are read, with numbers as in ape:temperature=0.9,scale=0.9; see "
            "rag-windows methods. Default: the profile's, else ape.",
        ),
    ] = None
    profile: Annotated[
        str | None, option("FILE", "A method's numbers, by rag-windows calibrate.")
    ] = None
    rag_temperature: Annotated[
        float | None, option("T", "The same as --method ape:temperature=T.")
    ] = None
    rag_scale: Annotated[float | None, option("S", "The same as --method ape:scale=S.")] = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    max_window_tokens: options.MaxWindowTokens = None
    cache_dir: options.CacheDir = None
    no_cache: Annotated[bool, flag("--no-cache", "Encode all anew, and keep nothing.")] = False
    verbose: options.Verbose = False
    cache_memory: str | None = None

    @property
    def name(self) -> str:
        """The model's name or folder."""
        return self.model or DEFAULT_MODEL


@contextmanager
def loaded_model(model: ModelOptions) -> Iterator[WindowedLM]:
    """The model on its device; at the end, what was encoded is written into its cache."""
    lm = _load(model)
    try:
        yield lm
    finally:
        if lm.cache is not None:
            lm.cache.close()


def _load(model: ModelOptions) -> WindowedLM:
    quieten(model.verbose)
    from rag_windows.calibration import Profile
    from rag_windows.integration import method_of

    given = {"temperature": model.rag_temperature, "scale": model.rag_scale}
    numbers = {name: value for name, value in given.items() if value is not None}
    profile = None if model.profile is None else Profile.load(model.profile)
    method = None
    if profile is None or model.method is not None:
        named = model.method or DEFAULT_METHOD
        if twice := [name for name in numbers if f"{name}=" in named]:
            raise MethodError(f"--rag-{twice[0]} and --method {named} both set it; leave one out.")
        method = method_of(named, numbers)
    elif numbers:
        raise InputError(
            "--profile brings the numbers of the method: leave --rag-temperature and --rag-scale "
            "out, or give --method too, which then counts instead."
        )
    device = None if model.device == "auto" else choose_device(model.device)
    far = model.name != DEFAULT_MODEL
    with progress(f"Loading {model.name}"):
        from huggingface_hub.utils import logging as hub_logging
        from huggingface_hub.utils.tqdm import disable_progress_bars
        from transformers.utils import logging as transformers_logging

        from rag_windows import WindowedLM

        if far and not os.path.exists(model.name):
            notice_missing_network()
        if not model.verbose:
            transformers_logging.set_verbosity_error()
            hub_logging.set_verbosity_error()
            # On a terminal they show downloads, and the weights as they are loaded.
            if not (far and sys.stderr.isatty()):
                transformers_logging.disable_progress_bar()
                disable_progress_bars()
        lm = WindowedLM.from_pretrained(
            model.name,
            dtype=model.dtype,
            device_map=device,
            method=method,
            profile=profile,
            max_window_tokens=model.max_window_tokens,
            cache=_cache(model),
        )
    if profile is not None and (told := profile.model.mismatch(lm.model)):
        tell(f"Note: {told}")
    return lm


def quieten(verbose: bool) -> None:
    """Silence the libraries' logs and warnings; before their import, which may warn as well."""
    if verbose:
        return
    warnings.simplefilter("ignore")
    for name in ("transformers", "accelerate", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def choose_device(asked: str) -> str:
    """Where the model goes: "cpu", "cuda", "cuda:N", or "auto" for several accelerators.

    Raises:
        InputError: a CUDA device that is not there.
    """
    from rag_windows.loading import best_device, check_device

    if asked == "auto":
        return best_device()
    check_device(asked, "--device ")
    return asked


def _cache(model: ModelOptions) -> PassageCache | None:
    from rag_windows import PassageCache

    if model.cache_memory is not None:
        return PassageCache(memory=model.cache_memory)
    if model.no_cache:
        return None
    try:
        return PassageCache.default(model.cache_dir)
    except CacheError as error:
        if model.cache_dir is not None:
            raise
        # An answer needs no cache: where the platform's folder can't be used, there is none.
        tell(f"Note: {error} Passages are not cached.")
        return None


def notice_missing_network() -> None:
    """Without a way to the hub, look only into the local cache: its client retries for a minute."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname, port), timeout=_CONNECT_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True
