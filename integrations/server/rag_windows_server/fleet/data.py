"""Encodes corpora and asks questions over a cluster of Ray's, in processes with a model each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import ActorPool

from rag_windows.errors import DocumentError, InputError, ModelError
from rag_windows.passage import Passage
from rag_windows.samples import samples_path
from rag_windows_retrievers.documents import (
    DocumentFile,
    Skipped,
    found_files,
    no_text,
)
from rag_windows_retrievers.splitting import split_document
from rag_windows_server.fleet.cluster import cluster

if TYPE_CHECKING:
    from rag_windows import WindowedLM
    from rag_windows.warm import OnWarmed, Warmed
    from rag_windows_server.fleet.options import FleetOptions

R = TypeVar("R")
T = TypeVar("T")

BATCH = 64
"""Passages that a process encodes before it says that they are in the store."""

_RESTARTS = 3  # of a process that dies; what kills it again and again must end


@contextmanager
def _errors_of_processes() -> Iterator[None]:
    """Raise what was raised in another process as if it were raised here."""
    try:
        yield
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(
            f"A process with the model ended, and so did those in its place: {reason}. Look into "
            "Ray's logs. Where memory was short, give fewer --replicas."
        ) from error


class Model:
    """A model in a process of its own, which is loaded when it is first needed."""

    def __init__(self, options: FleetOptions) -> None:
        self._options = options

    @cached_property
    def lm(self) -> WindowedLM:
        """The loaded model."""
        return self._options.load_model()

    def call(self, function: Callable[..., R], *given: Any) -> R:
        """The result of a function of the model."""
        return function(self.lm, *given)


class Models:
    """Several models, each in a process of its own; one that dies is started again.

    Args:
        options: of each of them.
    """

    def __init__(self, options: FleetOptions) -> None:
        actor = ray.remote(Model).options(
            **_size(options),
            scheduling_strategy="SPREAD",
            max_restarts=_RESTARTS,
            max_task_retries=-1,
        )
        self._actors: list[Any] = [actor.remote(_divided(options)) for _ in range(options.replicas)]

    def each(self, function: Callable[[WindowedLM], R]) -> list[R]:
        """The results of a function for every model."""
        with _errors_of_processes():
            found: list[R] = ray.get([one.call.remote(function) for one in self._actors])
            return found

    def map(
        self, function: Callable[[WindowedLM, T], Sequence[R]], items: Iterable[T]
    ) -> Iterator[R]:
        """The results of a function for items, as they arrive; each is asked of a free model.

        An item is taken when a model is free for it. An item whose process died is asked again.
        """
        pool, shared = ActorPool(self._actors), ray.put(function)

        def ask(actor: Any, item: T) -> Any:
            return actor.call.remote(_called, shared, item)

        with _errors_of_processes():
            for item in items:
                if not pool.has_free():
                    yield from pool.get_next_unordered()
                pool.submit(ask, item)
            while pool.has_next():
                yield from pool.get_next_unordered()


def _called(lm: WindowedLM, function: Callable[[WindowedLM, T], R], item: T) -> R:
    return function(lm, item)


def _size(options: FleetOptions) -> dict[str, Any]:
    """What Ray reserves for a process."""
    if options.gpus_per_replica:
        return {"num_gpus": options.gpus_per_replica}
    return {"num_cpus": options.cpus_per_replica}


def _divided(options: FleetOptions) -> FleetOptions:
    """Options that divide a share of the free memory among the caches on one machine."""
    memory, machines = options.cache_memory, len([one for one in ray.nodes() if one["Alive"]])
    if not isinstance(memory, str) or not memory.endswith("%"):
        return options
    together = -(-options.replicas // max(1, machines))
    return options.model_copy(update={"cache_memory": f"{float(memory[:-1]) / together:.4f}%"})


# Corpora


Prefix: TypeAlias = "str | Callable[[WindowedLM], str | None] | None"


def _encode(
    prefix: Prefix, lm: WindowedLM, passages: Sequence[Passage]
) -> list[tuple[Warmed, int]]:
    """What warming passages did, and how many of their windows could not be written."""
    store = None if lm.cache is None else lm.cache.shared
    before = 0 if store is None else store.unwritten
    warmed = lm.warm(passages, prefix=prefix(lm) if callable(prefix) else prefix)
    return [(warmed, 0 if store is None else store.unwritten - before)]


@dataclass(frozen=True, slots=True)
class WarmedCorpus:
    """What warming over a cluster did.

    Attributes:
        warmed: the sums over all processes.
        skipped: files and lines that were left out, and why.
        unwritten: windows that were encoded and could not be written to the store.
    """

    warmed: Warmed
    skipped: tuple[Skipped, ...]
    unwritten: int


def warm(
    options: FleetOptions,
    *,
    address: str | None = None,
    prefix: Prefix = None,
    strict: bool = False,
    on_warmed: OnWarmed | None = None,
) -> WarmedCorpus:
    """Encode documents into the store that the models share.

    Files are read and split here, and their passages encoded by ``options.replicas`` processes.
    What the store has is not encoded, so the same call goes on where an interrupted one stopped.

    Args:
        options: of the model, the documents and the store.
        address: of a `cluster`, which is not asked before the files are found.
        prefix: the same system prompt as in the later requests, or what gives it for the model.
        strict: whether a file or a line that can't be read is an error.
        on_warmed: called with the number of passages done.

    Raises:
        InputError: there is no place that the models share.
        DocumentError: there is no text, or, with ``strict``, something can't be read.
    """
    if options.shared is None and options.cache_dir is None:
        raise InputError(
            "Passages that are encoded over a cluster need a store. Give --shared, or --cache-dir "
            "with a folder that all machines see."
        )
    from rag_windows.warm import Warmed

    begun = time.perf_counter()
    # What is encoded is read again by nobody here, but for the prefix.
    options = options.model_copy(update={"cache_memory": "256MiB"})
    sample = samples_path() / "corpus"
    names, root = (options.docs, Path()) if options.docs else ([str(sample)], sample)
    found = list(found_files(names, root=root))
    skipped: list[Skipped] = []
    if not any(isinstance(one, DocumentFile) for one in found):
        raise no_text(names, [one for one in found if isinstance(one, Skipped)])

    def passages() -> Iterator[Passage]:
        for file in found:
            for one in file.read() if isinstance(file, DocumentFile) else [file]:
                if not isinstance(one, Skipped):
                    yield from split_document(one, words=options.passage_words)
                    continue
                if strict and one.problem:
                    raise DocumentError(f"{one.label}: {one.reason}")
                skipped.append(one)

    sums: Counter[str] = Counter()
    with cluster(address, options.replicas, options.cpus_per_replica):
        read = passages()
        batches = iter(lambda: [*islice(read, BATCH)], [])
        for done, unwritten in Models(options).map(partial(_encode, prefix), batches):
            sums.update(asdict(done))
            sums["unwritten"] += unwritten
            if on_warmed is not None:
                on_warmed(sums["passages"], None)
    if not sums["passages"]:
        raise no_text(names, skipped)
    counts = {name: sums[name] for name in ("passages", "encoded", "present", "tokens")}
    warmed = Warmed(**counts, seconds=time.perf_counter() - begun)
    return WarmedCorpus(warmed, tuple(skipped), sums["unwritten"])
