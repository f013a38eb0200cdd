"""Options that several commands take, and what comes of them: documents, a loaded model."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import importlib
import inspect
import json
import logging
import os
import re
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_origin, get_type_hints
from urllib.parse import urlsplit
from urllib.request import getproxies

import typer
from pydantic import ValidationError

from rag_windows.cache.folder import INDEXES, default_folder, in_home
from rag_windows.cli.render import Counted, progress, tell
from rag_windows.errors import (
    CacheError,
    DocumentError,
    InputError,
    MethodError,
    RetrievalError,
    require,
)
from rag_windows.samples import samples_path
from rag_windows.visible_text import encodable

if TYPE_CHECKING:
    from rag_windows import Method, Passage, PassageCache, WindowedLM
    from rag_windows_retrievers import Encoder, Index, Retriever, Skipped
    from rag_windows_server.fleet import FleetOptions


def option(metavar: str | None, text: str, **settings: Any) -> Any:
    """An option that takes a value; further arguments are those of `typer.Option`."""
    return typer.Option(metavar=metavar, help=text, **settings)


def flag(name: str, text: str) -> Any:
    """An option that takes none."""
    return typer.Option(name, help=text)


def count(text: str) -> Any:
    """An option that takes a number of something, at least one."""
    return typer.Option(min=1, metavar="N", help=text)


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} must be one of auto, cpu, cuda and cuda:N")
    return value


def _link_tokens(value: str) -> int | float | str:
    try:
        if value.endswith("%"):
            share = float(value[:-1]) / 100
            return "all" if share == 1.0 else share
        return value if value == "all" else int(value) if value.isdecimal() else float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} must be a number of tokens (16), a share (0.15 or 15%) or all"
        ) from None


_LINKED = (
    "Tokens of each window to encode again with the other windows in view: 16, 0.15, 15% or all."
)
_FOLDER = "Folder of the passage cache. Default: the platform's cache folder."

Model = Annotated[
    str, option("MODEL", "The shipped tiny-reader, a local folder or a name on the Hub.")
]
LinkTokens = Annotated[Any, option("K", _LINKED, parser=_link_tokens)]
LinkChoose = Annotated[
    Literal["first", "deviation", "query", "last"],
    option(
        None,
        "Which of them: the first, those whose keys change most, or those to which the question, "
        "or its last token, attends most.",
    ),
]
DEFAULT_PASSAGE_WORDS = 120
PassageWords = Annotated[
    int | None,
    count(
        f"Approximate length of a passage in words. Default: {DEFAULT_PASSAGE_WORDS}, and that of "
        "an index which exists."
    ),
]
Embedder = Annotated[
    str | None,
    option(
        "MODEL",
        "Find passages by meaning, too, with this model of sentence-transformers: a local folder "
        "or a name on the Hub.",
    ),
]
System = Annotated[
    str | None,
    option(
        "TEXT", "Instruction (system prompt) that is read before the passages.", parser=encodable
    ),
]
INSTRUCTION = (
    "Answer the question with a short phrase, using the documents. If no document answers it, say "
    "that it is not stated."
)
"""Is sent where the user gives none; benchmarks/results/instructions.md says what it does."""

Instruction = Annotated[
    str | None,
    option(
        "TEXT",
        'Instruction (system prompt) that is read before the passages; "" sends none. Default, '
        "behind the chat template's own system message and "
        f'but for the small models of this project, which were trained without: "{INSTRUCTION}"',
        parser=encodable,
    ),
]
MaxNewTokens = Annotated[int, count("Largest number of tokens of an answer.")]
Device = Annotated[
    str, option("DEVICE", "Device of the model: auto, cpu, cuda or cuda:N.", callback=_device)
]
CacheDir = Annotated[str | None, option("DIR", _FOLDER)]
Shared = Annotated[
    str | None,
    option("URL", "Store of passages that machines share: a folder, or s3://bucket/prefix."),
]
Strict = Annotated[bool, flag("--strict", "Stop with an error if a file can't be read.")]
TopK = Annotated[int, count("Number of passages to retrieve.")]
Json = Annotated[bool, flag("--json", "Print one JSON object and nothing else.")]
Verbose = Annotated[
    bool, flag("--verbose", "Show the libraries' warnings, logs and progress bars.")
]

_Command = Callable[..., None]


def spreading(*, without: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Let a command take dataclasses: each of their fields becomes an option in its place.

    A field that is annotated with no option keeps its default, and so do those `without` one.
    """

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        taken: list[inspect.Parameter] = []
        owned: dict[str, list[str]] = {}
        for name, parameter in inspect.signature(command).parameters.items():
            if not dataclasses.is_dataclass(kind := hints[name]):
                taken.append(parameter.replace(annotation=kind))
                continue
            inside = get_type_hints(kind, include_extras=True)
            defaults = {field.name: field.default for field in dataclasses.fields(kind)}
            options = (one for one in defaults if get_origin(inside[one]) is Annotated)
            owned[name] = [one for one in options if one not in without]
            for one in owned[name]:
                spread = parameter.replace(name=one, annotation=inside[one])
                taken.append(spread.replace(default=defaults[one]))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, fields in owned.items():
                given[name] = hints[name](**{field: given.pop(field) for field in fields})
            links = [one for one in given.values() if hasattr(one, "link_tokens")]
            for one in given.values():
                if isinstance(one, LoadOptions):
                    check_model(one, *((each.link_tokens, each.link_choose) for each in links))
            command(**given)

        run.__annotations__ = {one.name: one.annotation for one in taken} | {"return": None}
        run.__signature__ = inspect.Signature(taken, return_annotation=None)  # type: ignore[attr-defined]  # what inspect looks at first
        return run

    return decorate


DEFAULT_MODEL = "tiny-reader"
SAMPLE_MODEL = (
    f"The shipped model {DEFAULT_MODEL} answers; it knows only the sample corpus. For documents of "
    "your own, name them with --docs and a model with --model."
)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Where passages come from; each field becomes the option of the same name."""

    docs: Annotated[
        list[str] | None,
        option(
            "PATH",
            "File, folder, quoted pattern or URL such as s3://bucket/docs; can be repeated. "
            "Default: the sample corpus.",
        ),
    ] = None
    index: Annotated[
        str | None,
        option(
            "DIR",
            "Folder of an index, see rag-windows index; with --docs it is brought up to date with "
            "them first. Default, with --docs: one for these documents in the cache folder.",
        ),
    ] = None
    embedder: Embedder = None
    strict: Strict = False
    top_k: TopK = 8
    passage_words: PassageWords = None


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
    """Size of a cache in memory alone, in place of the one on disk."""

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


@dataclass(frozen=True, slots=True)
class RayOptions:
    """A cluster of Ray's that does the work, if one is named or started."""

    ray: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Work over this cluster of Ray; auto is the one that this machine belongs to. "
            "Default, with --replicas: one on this machine.",
        ),
    ] = None
    replicas: Annotated[
        int | None, count("Processes of the cluster, each with a model. Default, with --ray: 1.")
    ] = None
    gpus_per_replica: Annotated[float, option("N", "GPUs of each process.", min=0)] = 0.0
    cpus_per_replica: Annotated[
        float, option("N", "CPUs that Ray counts for each process, and its threads.", min=0)
    ] = 1.0

    @property
    def wanted(self) -> bool:
        """Whether a cluster does the work."""
        return self.ray is not None or self.replicas is not None

    @property
    def size(self) -> dict[str, Any]:
        """As `FleetOptions` has it."""
        return {
            "replicas": self.replicas or 1,
            "gpus_per_replica": self.gpus_per_replica,
            "cpus_per_replica": self.cpus_per_replica,
        }


def check_model(model: LoadOptions, link: tuple[Any, Any] = (None, "first")) -> None:
    """Refuse what is wrong with method, profile and device, before documents are read.

    ``link`` are the values of --link-tokens and --link-choose, where a command has them.
    """
    from rag_windows.methods import Auto, linked

    method = _method(model)
    linked(method or Auto(), *link)
    if model.profile is None and model.device in ("auto", "cpu"):
        return
    # What follows imports torch.
    quieten(model.verbose)
    with nullcontext() if model.verbose else progress("Checking the options"):
        _import_libraries(model)
        from rag_windows.calibration import Profile
        from rag_windows.loading import check_device

        check_device(model.device, "--device ")
        if model.profile is not None:
            found = Profile.load(model.profile).method
            linked(method or found, *link)


@contextmanager
def loaded_model(model: LoadOptions) -> Iterator[WindowedLM]:
    """The model on its device; at the end, what was encoded is written into its cache."""
    quieten(model.verbose)
    shown: AbstractContextManager[Counted | None] = (
        nullcontext() if model.verbose else progress(f"Loading {model.name}")
    )
    with shown as counted:
        _import_libraries(model)
        from rag_windows import WindowedLM
        from rag_windows.calibration import Profile
        from rag_windows.loading import check_device
        from rag_windows.prompt.conversation import knows_variable

        profile = None if model.profile is None else Profile.load(model.profile)
        method, variables = _method(model), model.template_kwargs
        check_device(model.device, "--device ")
        if model.name != DEFAULT_MODEL and not os.path.exists(model.name):
            _notice_missing_network()
        with reported_instead_of_bars(counted) as bars:
            lm = WindowedLM.from_pretrained(
                model.name,
                dtype=model.dtype,
                dequantize=model.dequantize,
                device_map=None if model.device == "auto" else model.device,
                method=method,
                profile=profile,
                max_window_tokens=model.max_window_tokens,
                template_kwargs=variables,
                cache=_cache(model),
                **bars,
            )
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


def fleet_options(search: SearchOptions, model: LoadOptions, **more: Any) -> FleetOptions:
    """The same model and documents for readers on other machines; further arguments are theirs."""
    if search.index is not None or search.embedder is not None:
        raise InputError(
            "The processes of a fleet read --docs themselves and find passages by words, so "
            "--index and --embedder can't be given. Name the documents with --docs alone."
        )
    quieten(model.verbose)
    require("A fleet", "rag-windows-server", "ray", extra="fleet")
    from rag_windows.integration import describe
    from rag_windows_server.fleet import FleetOptions

    method, name = _method(model), model.model
    try:
        return FleetOptions(
            # A name on the Hub is no path.
            model=_anywhere(name) if name is not None and os.path.exists(name) else name,
            device=model.device,
            dtype=model.dtype,
            dequantize=model.dequantize,
            method=None if method is None else describe(method),
            profile=None if model.profile is None else _anywhere(model.profile),
            max_window_tokens=model.max_window_tokens,
            template_kwargs=model.template_kwargs,
            docs=tuple(map(_anywhere, search.docs or ())),
            passage_words=search.passage_words or DEFAULT_PASSAGE_WORDS,
            cache_dir=None if model.no_cache else model.cache_dir and _anywhere(model.cache_dir),
            shared=None if model.no_cache else model.shared and _anywhere(model.shared),
            shared_wait=model.shared_wait,
            shared_apart=model.shared_apart,
            **more,
        )
    except ValidationError as error:
        raise InputError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error


def _anywhere(path: str) -> str:
    """A path as processes in other folders find it; addresses stay."""
    return path if "://" in path else os.path.abspath(path)


def _import_libraries(model: LoadOptions) -> None:
    """Import what models need: 3,000 modules, which would take a third longer with collections.

    What they hold lives as long as the process, so later collections leave it alone.
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


def _method(model: LoadOptions) -> Method | None:
    """The method that is asked for; None for the profile's, or the model's own."""
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
    for name in ("transformers", "accelerate", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def reported_instead_of_bars(counted: Counted | None) -> Iterator[dict[str, Any]]:
    """Silence the bars and logs of transformers and the hub, and count what they load.

    Yields what `from_pretrained` takes so that downloads of weights are counted, too; with nobody
    to tell, nothing, and all bars stay as they are.
    """
    if counted is None:
        yield {}
        return
    report = counted
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm
    from transformers.utils import logging as transformers_logging

    class ReportedBar(tqdm):
        """Is never drawn; what is done is reported instead."""

        def __init__(self, *args: Any, unit: str = "", **settings: Any) -> None:
            self._unit = unit
            super().__init__(*args, **{**settings, "disable": True})

        def __iter__(self) -> Iterator[Any]:
            for one in self.iterable:
                yield one
                self.update()

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._unit:
                report(int(self.n), self.total, self._unit)

    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    disable_progress_bars()
    hook = transformers_logging.set_tqdm_hook(
        lambda _, args, settings: ReportedBar(*args, **{**settings, "unit": "weights"})
    )
    try:
        yield {"tqdm_class": ReportedBar}
    finally:
        transformers_logging.set_tqdm_hook(hook)


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


class Corpus(Protocol):
    """Documents' passages, and what finds them."""

    @property
    def passages(self) -> Sequence[Passage]:
        """All of them."""

    def retrieve(self, query: str, k: int = ...) -> list[Passage]:
        """The best ones; see `rag_windows_retrievers.Retriever`."""


@dataclass(frozen=True, slots=True)
class _Fused:
    """A corpus in memory that is searched in two ways."""

    passages: Sequence[Passage]
    both: Retriever

    def retrieve(self, query: str, k: int = 8) -> list[Passage]:
        return self.both.retrieve(query, k)


def open_corpus(search: SearchOptions, model: LoadOptions) -> Corpus:
    """What finds the documents' passages; what was not read is reported.

    It is an index on disk, of which only files that have changed are read, but for the samples and
    where nothing may be written.
    """
    index = _index(search, model)
    if index is not None:
        return index
    passages = _read_passages(search)
    from rag_windows_retrievers import BM25Retriever, DenseRetriever, HybridRetriever

    with progress("Indexing passages"):
        words = BM25Retriever(passages)
    if search.embedder is None:
        return words
    encoder = load_embedder(search.embedder)
    with progress("Embedding passages") as counted:
        meaning = DenseRetriever(passages, encoder, progress=counted)
    return _Fused(words.passages, HybridRetriever([words, meaning]))


def read_passages(search: SearchOptions, model: LoadOptions) -> Sequence[Passage]:
    """The documents' passages; what was not read is reported."""
    index = _index(search, model)
    return _read_passages(search) if index is None else index.passages


def how_many(corpus: Corpus) -> int:
    """The number of a corpus' passages, of which none is read for it from an index."""
    from rag_windows_retrievers import Index

    return len(corpus) if isinstance(corpus, Index) else len(corpus.passages)


def _index(search: SearchOptions, model: LoadOptions) -> Index | None:
    """The index that is named, or that of --docs in the cache folder; None for none."""
    check_documents(search, model.model)
    if search.index is not None:
        return _up_to_date(search, Path(search.index))
    folder = _automatic_index(search, model) if search.docs else None
    if folder is None:
        return None
    try:
        return _up_to_date(search, folder)
    except RetrievalError as error:
        if model.cache_dir is not None:
            raise
        # An answer needs no index on disk.
        tell(f"Note: The documents are read again for each question. {error}")
        return None


def _up_to_date(search: SearchOptions, folder: Path) -> Index:
    """An index that holds what --docs hold now, beside what it had; opened as it is without."""
    from rag_windows_retrievers import Index, open_index
    from rag_windows_retrievers.documents import no_text

    if not search.docs:
        return with_embedder(open_index(folder), search.embedder)
    with progress("Reading documents") as counted:
        index = Index(folder, words=search.passage_words)
        changes = index.follow(
            search.docs, progress=lambda done, whole: counted(done, whole, "files")
        )
    if not len(index):
        raise no_text(search.docs, changes.skipped)
    tell_left_out(changes.skipped, strict=search.strict)
    return with_embedder(index, search.embedder)


def with_embedder(index: Index, embedder: str | None) -> Index:
    """The index, searched by meaning, too; passages without a vector get one."""
    if embedder is None:
        if (made_by := index.model_name) is not None:
            tell(
                f"Note: Passages are found by words only. The index holds vectors of {made_by}; "
                "name that model with --embedder to find them by meaning, too."
            )
        return index
    from rag_windows_retrievers import Index

    encoder = load_embedder(embedder)
    index.close()
    with progress("Embedding passages") as counted:
        return Index(index.folder, encoder, progress=counted)


def load_embedder(name: str) -> Encoder:
    """A model of sentence-transformers, from a local folder or the Hub."""
    from rag_windows_retrievers import SentenceEncoder

    quieten(verbose=False)
    with progress(f"Loading {name}") as counted, reported_instead_of_bars(counted):
        return SentenceEncoder(name)


def _automatic_index(search: SearchOptions, model: LoadOptions) -> Path | None:
    """Where the index of --docs lies for the next question; None where nothing is written.

    Labels of files are relative to the working directory, so that each has an index of its own.
    """
    if model.no_cache:
        return None
    named, words = search.embedder, search.passage_words or DEFAULT_PASSAGE_WORDS
    try:
        asked = [
            os.getcwd(),
            [_anywhere(os.path.expanduser(one)) for one in search.docs or ()],
            words,
            _anywhere(named) if named is not None and os.path.exists(named) else named,
        ]
        folder = (
            index_folder(model.cache_dir)
            / hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
        )
        make_private(folder)
    except CacheError as error:
        if model.cache_dir is not None:
            raise
        tell(f"Note: The documents are read again for each question. {error}")
        return None
    return folder


def index_folder(cache_dir: str | None) -> Path:
    """The folder of indexes, inside that of the passage cache."""
    return (default_folder() if cache_dir is None else in_home(cache_dir)) / INDEXES


def make_private(folder: Path) -> None:
    """Make a folder of `index_folder` for this user only."""
    try:
        for one in (folder.parent.parent, folder.parent, folder):
            one.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"The folder {folder.parent.parent} can't be used ({error.strerror}). Name another one "
            "with --cache-dir or RAG_WINDOWS_CACHE_DIR."
        ) from error


def _read_passages(search: SearchOptions) -> tuple[Passage, ...]:
    from rag_windows_retrievers import load_documents, split_documents

    with progress("Reading documents"):
        if search.docs:
            loaded = load_documents(search.docs, strict=False)
        else:
            sample = samples_path() / "corpus"
            loaded = load_documents([sample], root=sample)
        words = search.passage_words or DEFAULT_PASSAGE_WORDS
        passages = split_documents(loaded.documents, words=words)
    tell_left_out(loaded.skipped, strict=search.strict)
    return passages


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


def check_documents(search: SearchOptions, model: str | None) -> None:
    """Refuse documents without a model that could answer over them."""
    if (search.docs or search.index is not None) and model is None:
        needed = "--docs needs a model." if search.docs else "--index needs a model."
        unnamed = InputError(
            f"{needed} Name one with --model or in RAG_WINDOWS_MODEL: a local folder or a name on "
            "the Hub, such as Qwen/Qwen2.5-1.5B-Instruct."
        )
        unnamed.add_note(
            "The shipped tiny-reader can answer over the sample corpus only; to use it all the "
            "same, give --model tiny-reader."
        )
        raise unnamed
    quieten_readers()


def quieten_readers() -> None:
    """Let readers of files not warn of oddities inside what they read all the same."""
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"openpyxl\.")


def tell_left_out(skipped: Sequence[Skipped], *, strict: bool) -> None:
    """Say which files and lines were not read; an error if they should have been and `strict`."""
    partial = [one for one in skipped if one.partial and not (strict and one.problem)]
    skipped = [one for one in skipped if one not in partial]
    for pages in partial:
        tell(f"Note: {pages.label}: {pages.reason}.")
    bad = [f"{one.label}: {one.reason}" for one in skipped if one.problem]
    of_all = f"{len(bad)} {'file or line' if len(bad) == 1 else 'files or lines'} of the documents"
    if strict and len(bad) == 1:
        raise DocumentError(bad[0])
    if strict and bad:
        error = DocumentError(f"{of_all} can't be read. Correct them, or leave out --strict.")
        for one in bad:
            error.add_note(f"- {one}")
        raise error
    if bad:
        tell(f"Note: {of_all} can't be read; the others are used (--strict stops here):")
    for one in bad:
        tell(f"- {one}")
    others = [f"{one.label} ({one.reason})" for one in skipped if not one.problem]
    if others:
        more = f"; and {len(others) - 3} more" if len(others) > 3 else ""
        tell(f"Note: Left out: {'; '.join(others[:3])}{more}.")
