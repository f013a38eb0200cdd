"""The KV connector: the scheduler's side and the worker's."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from rag_windows.errors import InputError, RagWindowsError
from rag_windows.interchange import Window
from vllm_rag_windows.entries import Entries, EntryOptions, MissingEntriesError, files_fingerprint
from vllm_rag_windows.paged import PagedLayers
from vllm_rag_windows.rotary import frequencies, moved
from vllm_rag_windows.support import check_engine
from vllm_rag_windows.windowed_prompt import WindowedPrompt, check_cache_salt

logger = init_logger(__name__)


@dataclass(frozen=True)
class Transfer:
    """Tokens of one request to load, from `first` on, or to save."""

    request_id: str
    prompt: WindowedPrompt
    blocks: list[int]
    first: int = 0


@dataclass
class Transfers(KVConnectorMetadata):
    """What the worker does in one step; `refused` are requests whose windows make no sense."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class RagWindowsConnector(KVConnectorBase_V1):
    """Saves windows that are encoded, and loads those that a request reads.

    The scheduler counts prefix and windows of a request as tokens that are there, and asks the
    worker to load them between two steps. The worker finds their entries, moves the keys to where
    vLLM's positions have them, divides those of the windows by the temperature, and writes them
    into the request's blocks. A request whose windows are not there, or can't be served, ends with
    the finish reason "error"; the log says why.

    Raises:
        InputError, UnsupportedModelError: the model or vLLM's options can't be served.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        self._options = EntryOptions.of(self._kv_transfer_config.kv_connector_extra_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise InputError("Models with several kinds of KV cache are not supported.")
        self._asked: dict[str, WindowedPrompt | RagWindowsError | None] = {}
        self._encoding: dict[str, Any] = {}
        self._next = Transfers()
        self._results = KVConnectorTransferResults()
        self._begun = 0.0
        if role is KVConnectorRole.WORKER:
            model = vllm_config.model_config
            self._angles = frequencies(model.hf_text_config)
            self._entries = Entries(self._options, self._fingerprint(model))

    @property
    def requires_kv_delivery(self) -> bool:
        """A request that is preempted loads its windows again."""
        return False

    # The scheduler's side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens of prefix and windows behind those that vLLM has cached itself."""
        asked = self._read(request)
        if isinstance(asked, RagWindowsError):
            return 1, True  # so that the worker's answer ends it
        if asked is None or asked.encode:
            return 0, False
        left = max(0, asked.read_tokens - num_computed_tokens)
        return left, left > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a load, now that the request has its blocks."""
        asked, name = self._read(request), request.request_id
        if isinstance(asked, WindowedPrompt) and asked.encode:
            self._encoding[name] = request
        elif num_external_tokens > 0 and isinstance(asked, WindowedPrompt):
            (ids,) = blocks.get_block_ids()
            first = asked.read_tokens - num_external_tokens
            self._next.loads.append(Transfer(name, asked, ids, first))
        elif num_external_tokens > 0:
            self._next.refused.append(name)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """All loads that were noted, and the saves of windows that this step finishes."""
        work, self._next = self._next, Transfers()
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._encoding.get(name)
            asked = self._asked.get(name)
            if request is None or not isinstance(asked, WindowedPrompt):
                continue
            if request.num_computed_tokens + tokens >= asked.read_tokens:
                (ids,) = self._kv_cache_manager.get_block_ids(name)
                work.saves.append(Transfer(name, asked, list(ids)))
                del self._encoding[name]
        return work

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that has ended in whatever way; its blocks may go at once."""
        self._asked.pop(request.request_id, None)
        self._encoding.pop(request.request_id, None)
        return False, None

    def _read(self, request: Any) -> WindowedPrompt | RagWindowsError | None:
        name = request.request_id
        if name not in self._asked:
            try:
                asked = WindowedPrompt.of(request.kv_transfer_params, request.prompt_token_ids)
                prefix_caching = self._vllm_config.cache_config.enable_prefix_caching
                if asked is not None and not asked.encode:
                    if prefix_caching:
                        check_cache_salt(request.cache_salt)
                    if request.skip_reading_prefix_cache:
                        raise InputError(
                            "Windows have no logprobs of the prompt. Don't ask for any."
                        )
                self._asked[name] = asked
            except RagWindowsError as error:
                logger.error("Request %s is refused: %s", name, error)
                self._asked[name] = error
                request.skip_reading_prefix_cache = False  # else the worker would not be asked
        return self._asked[name]

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note the layers; their buffers are looked at when they are first needed."""
        found = self._vllm_config.compilation_config.static_forward_context
        self._layers = [found[name] for name in sorted(kv_caches, key=extract_layer_index)]
        self._paged: PagedLayers | None = None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._begun = time.perf_counter()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load windows into the blocks of requests that wait for them."""
        work = self._get_connector_metadata()
        assert isinstance(work, Transfers)  # noqa: S101 - our own, from `build_connector_meta`
        failed = set(work.refused)
        for load in work.loads:
            try:
                self._load(load)
            except MissingEntriesError as error:
                logger.warning("Request %s: %s", load.request_id, error)
                failed.add(load.request_id)
        self._results.finished_recving |= {one.request_id for one in work.loads} | failed
        self._results.failed_recving |= failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are over before the layers run."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: windows are saved when the step is over."""

    def wait_for_save(self) -> None:
        """Save the windows that this step has finished."""
        work = self._get_connector_metadata()
        assert isinstance(work, Transfers)  # noqa: S101 - our own, from `build_connector_meta`
        seconds = time.perf_counter() - self._begun
        for save in work.saves:
            try:
                layers = self._buffers().read(save.blocks, 0, save.prompt.read_tokens)
                self._entries.keep(save.prompt, layers, seconds / len(work.saves))
            except RagWindowsError as error:
                logger.error("Request %s: %s", save.request_id, error)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Which requests' loads are over, and which of them failed."""
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def shutdown(self) -> None:
        """Write what waits to be written."""
        if self.role is KVConnectorRole.WORKER:
            self._entries.close()

    def _load(self, load: Transfer) -> None:
        prompt, paged = load.prompt, self._buffers()
        windows = self._entries.find(prompt)
        if any(not self._fits(window, paged) for window in windows):
            raise MissingEntriesError("Entries of another shape are filed under the model's name.")
        prefix = len(prompt.prefix)
        for layer in range(paged.count):
            keys = torch.cat([one.keys[layer].to(paged.device) for one in windows], dim=1)
            values = torch.cat([one.values[layer].to(paged.device) for one in windows], dim=1)
            keys = moved(keys, prompt.rotation, self._angles)
            keys[:, prefix:] /= prompt.temperature
            first = load.first
            paged.write(layer, load.blocks, first, keys[:, first:], values[:, first:])

    def _fits(self, window: Window, paged: PagedLayers) -> bool:
        shape = paged.heads, len(window.ids), paged.width
        return len(window.keys) == paged.count and all(
            one.shape == shape and one.dtype == paged.dtype
            for one in (*window.keys, *window.values)
        )

    def _buffers(self) -> PagedLayers:
        if self._paged is None:
            block_tokens = self._vllm_config.cache_config.block_size
            self._paged = PagedLayers(self._layers, block_tokens)
        return self._paged

    def _fingerprint(self, model: Any) -> bytes:
        if self._options.model_fingerprint is not None:
            return bytes.fromhex(self._options.model_fingerprint)
        folder = Path(model.model)
        if not folder.is_dir():
            # It is there: vLLM has loaded the model.
            found = snapshot_download(model.model, revision=model.revision, local_files_only=True)
            folder = Path(found)
        settings = str(model.dtype), str(model.quantization), model.hf_text_config.to_json_string()
        return files_fingerprint(folder, vllm_version, *settings)
