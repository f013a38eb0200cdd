"""Starting, asking and ending vLLM engines in this process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.vllm.cases import NEW_TOKENS, Case

CONNECTOR = "vllm_rag_windows.connector"
LOGPROBS = 64
"""How many of the likeliest tokens are compared."""


@contextlib.contextmanager
def engine(
    folder: Path, extra: Mapping[str, Any] | None = None, *, connector: bool = True, **options: Any
) -> Iterator[Any]:
    """A `vllm.LLM` with the connector; `extra` are the connector's options."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    transfer = {
        "kv_connector": "RagWindowsConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"memory": "64MiB", **(extra or {})},
        **options.pop("transfer", {}),
    }
    settings = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
        "max_logprobs": LOGPROBS,
        "seed": 0,
        **options,
    }
    llm = None
    try:
        if connector:
            settings["kv_transfer_config"] = transfer
        llm = LLM(model=str(folder), **settings)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def scheduler(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def encoding(case: Case) -> list[tuple[dict[str, Any], Any]]:
    """Prompts and sampling parameters of the requests that encode a case's windows."""
    params = {"prefix": len(case.prefix), "encode": True}
    return [
        ({"prompt_token_ids": [*case.prefix, *ids]}, sampling(1, params)) for ids in case.windows
    ]


def reading(case: Case, tokens: int = NEW_TOKENS, **changes: Any) -> tuple[dict[str, Any], Any]:
    """Prompt and sampling parameters of the request that reads them."""
    params = {
        "prefix": len(case.prefix),
        "windows": [len(ids) for ids in case.windows],
        "temperature": case.temperature,
        **changes,
    }
    return {"prompt_token_ids": list(case.ids)}, sampling(tokens, params)


def ordinary(ids: Sequence[int], tokens: int = NEW_TOKENS) -> tuple[dict[str, Any], Any]:
    """A request that knows nothing of windows."""
    return {"prompt_token_ids": list(ids)}, sampling(tokens, None)


def sampling(tokens: int, params: dict[str, Any] | None) -> Any:
    """Greedy, so many tokens, with the log-probabilities of the likeliest."""
    from vllm import SamplingParams

    extra = None if params is None else {"kv_transfer_params": params}
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, min_tokens=tokens, logprobs=LOGPROBS, extra_args=extra
    )


def run(llm: Any, requests: Sequence[tuple[dict[str, Any], Any]]) -> list[Any]:
    """The completion of each request; all are asked together."""
    prompts, params = [one for one, _ in requests], [one for _, one in requests]
    return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]


def error(completion: Any, expected: dict[str, Any]) -> float:
    """Largest difference of a log-probability of the first token from what was expected."""
    got = completion.logprobs[0]
    assert len(got) >= LOGPROBS
    return max(abs(one.logprob - expected["logprobs"][id_]) for id_, one in got.items())
