"""From the command line's options to a model and a method."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from rag_windows.cli.errors import tell
from rag_windows.cli.progress import Progress, Waiting
from rag_windows.errors import CacheError, InputError, MethodError

if TYPE_CHECKING:
    from rag_windows.cache.passage_cache import PassageCache
    from rag_windows.calibration import Profile
    from rag_windows.methods import Method
    from rag_windows.model import WindowedLM

DEFAULT_MODEL = "tiny-reader"
DEFAULT_METHOD = "ape"
_CONNECT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelOptions:
    """What `load_model` needs, as given on the command line."""

    model: str = DEFAULT_MODEL
    method: str | None = None
    temperature: float | None = None
    scale: float | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_window_tokens: int | None = None
    verbose: bool = False
    cache: bool = False
    cache_dir: str | None = None
    profile: str | None = None
    cache_memory: str | None = None
    """Size of a cache in memory alone, in place of the one on disk."""


def reader_model(named: str | None, docs: Sequence[str] | None) -> str:
    """The model that reads documents: the shipped one reads its own sample corpus and no other.

    Args:
        named: on the command line or by RAG_WINDOWS_MODEL, or None.
        docs: as given on the command line.

    Raises:
        InputError: documents, and no model named to read them.
    """
    if named is None and docs:
        error = InputError(
            "--docs needs a model that can read them: name one with --model or in "
            "RAG_WINDOWS_MODEL, a local folder or a name on the Hub such as "
            "Qwen/Qwen2.5-1.5B-Instruct or meta-llama/Llama-3.1-8B-Instruct."
        )
        error.add_note(
            f"The shipped {DEFAULT_MODEL} knows only the sample corpus; --model {DEFAULT_MODEL} "
            "forces it."
        )
        raise error
    return named or DEFAULT_MODEL


def build_method(name: str, temperature: float | None, scale: float | None) -> Method:
    """A method by name, with those parameters that were given.

    Raises:
        MethodError: the name is unknown, a parameter is not the method's, or out of its domain.
    """
    from rag_windows.methods import METHODS, resolve
    from rag_windows.methods.registry import known_parameters, parameters, with_known

    given = {"temperature": temperature, "scale": scale}
    chosen = {key: value for key, value in given.items() if value is not None}
    method = resolve(name)
    for key in chosen:
        if key not in known_parameters(method):
            owners = [other for other, one in METHODS.items() if key in parameters(one)]
            raise MethodError(
                f"--rag-{key} is not a parameter of {name}, only of {', '.join(owners)}; leave it "
                "out."
            )
        if re.search(rf"\b{key}\s*=", name):
            raise MethodError(f"--rag-{key} and --method {name} both set it; leave one out.")
    return with_known(method, chosen)


def load_model(options: ModelOptions, progress: Progress) -> WindowedLM:
    """Load the model onto its device.

    Raises:
        InputError: a device that is not there, or a method's parameters.
        ModelError: the model can't be found, loaded or read in windows.
    """
    quieten(options.verbose)
    profile = _profile(options)
    method = None
    if profile is None or options.method is not None:
        chosen = options.method or DEFAULT_METHOD
        method = build_method(chosen, options.temperature, options.scale)
    device = None if options.device == "auto" else choose_device(options.device)
    shown = f"Loading {options.model}"
    shipped = options.model == DEFAULT_MODEL
    local = shipped or os.path.exists(options.model)
    # transformers draws bars of its own, of downloads and of the weights as they are loaded.
    with progress.waiting(shown, draws_bars=not shipped) as waiting:
        if not local:
            notice_missing_network()
        lm = _load(options, method, profile, device, waiting)
    if profile is not None and (told := profile.model.mismatch(lm.model)):
        tell(f"Note: {told}")
    return lm


def _profile(options: ModelOptions) -> Profile | None:
    if options.profile is None:
        return None
    from rag_windows.calibration import Profile

    numbers = options.temperature, options.scale
    if options.method is None and any(number is not None for number in numbers):
        raise InputError(
            "--profile brings the numbers of the method: leave --rag-temperature and --rag-scale "
            "out, or give --method too, which then counts instead of the profile's."
        )
    return Profile.load(options.profile)


def quieten(verbose: bool) -> None:
    """Silence the libraries' logs and warnings, unless asked to be verbose.

    Before they are imported, since importing may warn as well.
    """
    if verbose:
        return
    warnings.simplefilter("ignore")
    for name in ("transformers", "accelerate", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _load(
    options: ModelOptions,
    method: Method | None,
    profile: Profile | None,
    device: str | None,
    waiting: Waiting,
) -> WindowedLM:
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    from rag_windows.model import WindowedLM

    if not options.verbose:
        transformers_logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
    if not (waiting.bars or options.verbose):
        transformers_logging.disable_progress_bar()
        disable_progress_bars()
    settings: dict[str, Any] = {
        "method": method,
        "max_window_tokens": options.max_window_tokens,
        "profile": profile,
    }
    if options.cache_memory is not None:
        from rag_windows.cache.passage_cache import PassageCache

        settings["cache"] = PassageCache(memory=options.cache_memory)
    elif options.cache:
        settings["cache"] = open_cache(options.cache_dir)
    return WindowedLM.from_pretrained(
        options.model,
        dtype=options.dtype,
        device_map=device,
        on_loaded=waiting.counted,
        **settings,
    )


def open_cache(folder: str | None) -> PassageCache | None:
    """The passage cache in a folder, or in the platform's.

    Where the platform's can't be used, that is told and there is none: an answer needs no cache.

    Raises:
        CacheError: the folder was asked for and can't be used.
    """
    from rag_windows.cache.passage_cache import PassageCache

    try:
        return PassageCache.default(folder)
    except CacheError as error:
        if folder is not None:
            raise
        tell(f"Note: {error} Passages are not cached.")
        return None


@contextmanager
def closing_cache(lm: WindowedLM) -> Iterator[None]:
    """Write what a command encoded, whatever becomes of the command."""
    try:
        yield
    finally:
        if lm.cache is not None:
            lm.cache.close()


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
