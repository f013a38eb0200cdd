"""Options of a fleet, and each reader's model, documents and keys that they name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rag_windows import InputError, PassageCache, WindowedLM
from rag_windows.integration import method_of
from rag_windows.samples import samples_path
from rag_windows_server.keys import Keys
from rag_windows_server.settings import Settings

if TYPE_CHECKING:
    from rag_windows_retrievers import BM25Retriever, Index


class FleetOptions(BaseModel):
    """A fleet: its model, passages, caches and size; ``args:`` of a config file of Ray Serve.

    Sizes are bytes, or texts as `rag_windows.PassageCache` takes them. Files and folders must be
    found under the same path on every machine.

    Attributes:
        model: a local folder or a name on the Hub. None: the shipped tiny-reader, over the sample
            corpus unless `docs` names other documents.
        device: "auto", "cpu", "cuda" or "cuda:N", of what Ray gives a reader.
        dtype: number format of the weights.
        dequantize: whether to unpack the weights of a GGUF file.
        quantization: "int8" packs weights into 8 bits each, on CPUs.
        method: how windows are read: "ape:scale=0.9", or what `rag_windows.integration.describe`
            made of a method. None for the profile's, or the model's default.
        profile: file that ``rag-windows compare`` wrote.
        max_window_tokens: longer passages are split into several windows.
        template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``.
        docs: files, folders or patterns of the fleet's own documents.
        passage_words: length of their passages.
        index: folder of a `rag_windows_retrievers.Index` in the place of `docs`, which all fronts
            and readers open: on one machine, since SQLite's locks work on no network's folder.
        cache_memory: host memory of each reader's passage cache.
        cache_device: accelerator memory of it.
        cache_disk: disk space of it, shared by the readers of a machine.
        cache_dir: its folder.
        shared: URL of the store that all readers share: ``s3://bucket/prefix``.
        shared_options: fsspec's options for it. Credentials stand better in the environment.
        shared_apart: each tenant has a folder of its own in it.
        shared_wait: the most seconds that a request waits for it.
        replicas: readers; with ``max_replicas`` the fewest.
        max_replicas: the most readers, started as questions come in; None for a fixed number.
        gpus_per_replica: GPUs that Ray reserves for a reader.
        cpus_per_replica: CPUs that it reserves, which are also the reader's threads.
        fronts: processes that take requests and pass them on to the readers.
        api_key_file: who may ask, as for ``rag-windows serve``; None lets everybody.
        settings: what requests may ask for, of each reader.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    dequantize: bool = False
    quantization: Literal["int8"] | None = None
    method: str | Mapping[str, Any] | None = None
    profile: str | None = None
    max_window_tokens: int | None = Field(default=None, ge=1)
    template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    docs: tuple[str, ...] = ()
    passage_words: int = Field(default=120, ge=1)
    index: str | None = None
    cache_memory: int | str | None = "4GiB"
    cache_device: int | str | None = None
    cache_disk: int | str | None = None
    cache_dir: str | None = None
    shared: str | None = None
    shared_options: Mapping[str, Any] = Field(default_factory=dict)
    shared_apart: bool = False
    shared_wait: float | None = Field(default=None, gt=0)
    replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    gpus_per_replica: float = Field(default=0, ge=0)
    cpus_per_replica: float = Field(default=1, ge=0)
    fronts: int = Field(default=1, ge=1)
    api_key_file: str | None = None
    settings: Settings = Field(default_factory=Settings)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            message = f"max_replicas must be at least replicas={self.replicas}"
            raise ValueError(f"{message}, not {self.max_replicas}.")
        return self

    def load_cache(self) -> PassageCache | None:
        """The passage cache of one reader; None if no place for one is named."""
        places = (self.cache_memory, self.cache_disk, self.cache_dir, self.cache_device)
        if not any(places) and self.shared is None:
            return None
        return PassageCache(
            memory=self.cache_memory,
            disk=self.cache_disk,
            path=self.cache_dir,
            device_bytes=self.cache_device,
            shared=self.shared,
            shared_options=self.shared_options,
            shared_apart=self.shared_apart,
            shared_wait=self.shared_wait,
        )

    def load_model(self) -> WindowedLM:
        """The model with its passage cache, as each reader has it.

        Raises:
            RagWindowsError: it can't be loaded, or its cache can't be opened.
        """
        lm = WindowedLM.from_pretrained(
            self.model or "tiny-reader",
            dtype=self.dtype,
            dequantize=self.dequantize,
            quantization=self.quantization,
            device_map=None if self.device == "auto" else self.device,
            method=None if self.method is None else method_of(self.method),
            profile=self.profile,
            max_window_tokens=self.max_window_tokens,
            template_kwargs=self.template_kwargs,
            cache=self.load_cache(),
        )
        if lm.cache is not None:
            # Else the first question would wait until the weights are read for the cache.
            with suppress(InputError):
                lm.fingerprints()
        return lm

    def load_documents(self) -> BM25Retriever | Index | None:
        """The index over the fleet's own documents; None if it has none."""
        if self.index is not None:
            from rag_windows_retrievers import open_index

            return open_index(self.index)
        if not self.docs and self.model is not None:
            return None
        from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

        sample = samples_path() / "corpus"
        loaded = (
            load_documents(self.docs, strict=False)
            if self.docs
            else load_documents([sample], root=sample)
        )
        return BM25Retriever(split_documents(loaded.documents, words=self.passage_words))

    def load_keys(self) -> Keys:
        """Who may ask."""
        return Keys() if self.api_key_file is None else Keys.load(self.api_key_file)
