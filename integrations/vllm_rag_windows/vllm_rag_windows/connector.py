"""The KV connector: the scheduler's side and the worker's."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

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

from rag_windows.errors import CacheError, InputError, RagWindowsError
from vllm_rag_windows.entries import Entries, EntryOptions, files_fingerprint
from vllm_rag_windows.paged import PagedLayers
from vllm_rag_windows.prompts import WindowedPrompt, checked
from vllm_rag_windows.support import check_engine, frequencies, moved

logger = init_logger(__name__)


@dataclass(frozen=True)
class Load:
    """The last tokens of prefix and windows that one request loads, or why it is refused."""

    request_id: str
    prompt: WindowedPrompt | RagWindowsError
    blocks: list[int]
    tokens: int


@dataclass
class Transfers(KVConnectorMetadata):
    """What the worker does in one step; saves are by request, each with its blocks."""

    loads: list[Load] = field(default_factory=list)
    saves: dict[str, tuple[WindowedPrompt, list[int]]] = field(default_factory=dict)


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
        given = self._kv_transfer_config.kv_connector_extra_config
        options = checked(EntryOptions, given, "kv_connector_extra_config")
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise InputError("Models with several kinds of KV cache are not supported.")
        self._asked: dict[str, WindowedPrompt | RagWindowsError | None] = {}
        self._encoding: dict[str, tuple[Any, WindowedPrompt]] = {}
        self._next = Transfers()
        self._results = KVConnectorTransferResults()
        if role is KVConnectorRole.WORKER:
            model = vllm_config.model_config
            self._angles = frequencies(model.hf_text_config)
            self._entries = Entries(options, _fingerprint(model, options.model_fingerprint))

    @property
    def requires_kv_delivery(self) -> bool:
        """A request that is preempted loads its windows again."""
        return False

    # The scheduler's side

    def on_new_request(self, request: Any) -> None:
        """Read what a request says of its windows.

        The keys of one that reads windows are moved. So that no other request finds its blocks in
        vLLM's prefix cache, and it nobody else's, it gets a salt that nobody has.
        """
        asked: WindowedPrompt | RagWindowsError | None
        try:
            asked = WindowedPrompt.of(request.kv_transfer_params, request.prompt_token_ids)
            if asked is not None and asked.encodes:
                self._encoding[request.request_id] = request, asked
            elif asked is not None:
                if request.skip_reading_prefix_cache:
                    raise InputError("Windows have no logprobs of the prompt. Don't ask for any.")
                request.cache_salt = f"rag-windows-{secrets.token_hex(16)}"
                request.block_hashes.clear()
                request.update_block_hashes()
        except RagWindowsError as error:
            asked = error
            request.skip_reading_prefix_cache = False  # else the worker would not be asked
        self._asked[request.request_id] = asked

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens of prefix and windows behind those that vLLM has cached itself."""
        asked = self._asked[request.request_id]
        if isinstance(asked, RagWindowsError):
            return 1, True  # so that the worker's answer ends it
        if asked is None or asked.encodes:
            return 0, False
        left = max(0, asked.read_tokens - num_computed_tokens)
        return left, left > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a load, now that the request has its blocks."""
        asked = self._asked[request.request_id]
        if asked is not None and num_external_tokens > 0:
            (ids,) = blocks.get_block_ids()
            self._next.loads.append(Load(request.request_id, asked, ids, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """All loads that were noted, and the saves of windows that this step finishes."""
        work, self._next = self._next, Transfers()
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            if name not in self._encoding:
                continue
            request, prompt = self._encoding[name]
            if request.num_computed_tokens + tokens >= prompt.read_tokens:
                (ids,) = self._kv_cache_manager.get_block_ids(name)
                work.saves[name] = prompt, list(ids)
                del self._encoding[name]
        return work

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that has ended in whatever way; its blocks may go at once."""
        self._asked.pop(request.request_id, None)
        self._encoding.pop(request.request_id, None)
        return False, None

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Look at the layers and their buffers."""
        found = self._vllm_config.compilation_config.static_forward_context
        layers = [found[name] for name in sorted(kv_caches, key=extract_layer_index)]
        self._paged = PagedLayers(layers, self._vllm_config.cache_config.block_size)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load windows into the blocks of requests that wait for them."""
        for load in cast(Transfers, self._get_connector_metadata()).loads:
            try:
                self._load(load)
            except RagWindowsError as error:
                logger.error("Request %s: %s", load.request_id, error)
                self._results.failed_recving.add(load.request_id)
            self._results.finished_recving.add(load.request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are over before the layers run."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: windows are saved when the step is over."""

    def wait_for_save(self) -> None:
        """Save the windows that this step has finished."""
        saves = cast(Transfers, self._get_connector_metadata()).saves
        for name, (prompt, blocks) in saves.items():
            try:
                self._entries.keep(prompt, self._paged.read(blocks, prompt.read_tokens))
            except RagWindowsError as error:
                logger.error("Request %s: %s", name, error)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Which requests' loads are over, and which of them failed."""
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def shutdown(self) -> None:
        """Write what waits to be written."""
        if self.role is KVConnectorRole.WORKER:
            self._entries.cache.close()

    def _load(self, load: Load) -> None:
        prompt, paged = load.prompt, self._paged
        if isinstance(prompt, RagWindowsError):
            raise prompt
        windows = self._entries.find(prompt)
        for one in windows:
            tensors = *one.keys, *one.values
            kinds = {(tensor.shape, tensor.dtype) for tensor in tensors}
            shape = torch.Size((paged.heads, len(one.ids), paged.width))
            if len(tensors) != 2 * paged.count or kinds != {(shape, paged.dtype)}:
                raise CacheError("Entries of another shape have the model's fingerprint.")
        prefix, first = len(prompt.prefix), prompt.read_tokens - load.tokens
        for layer in range(paged.count):
            keys = torch.cat([one.keys[layer].to(paged.device) for one in windows], dim=1)
            values = torch.cat([one.values[layer].to(paged.device) for one in windows], dim=1)
            keys = moved(keys, prompt.rotation, self._angles)
            keys[:, prefix:] /= prompt.temperature
            paged.write(layer, load.blocks, first, keys[:, first:], values[:, first:])


def _fingerprint(model: Any, given: str | None) -> bytes:
    if given is not None:
        return bytes.fromhex(given)
    folder = Path(model.model)
    if not folder.is_dir():
        # It is there: vLLM has loaded the model.
        folder = Path(
            snapshot_download(model.model, revision=model.revision, local_files_only=True)
        )
    settings = str(model.dtype), str(model.quantization), model.hf_text_config.to_json_string()
    return files_fingerprint(folder, vllm_version, *settings)
