"""Calling the kernel on tensors."""

from __future__ import annotations

import torch
from torch.profiler import record_function

from rag_windows.attention.native.building import kernel
from rag_windows.attention.native.items import Items
from rag_windows.errors import RagWindowsError

NAME = "rag_windows::attend"
"""What a profiler shows it as."""

_SHARES = 2
"""Tasks a thread is given at least, where the keys suffice: threads do not end at once."""


def call(items: Items, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a query's tokens over what the items say.

    Args:
        items: whose keys have the query's dtype.
        query: (tokens, heads, head dim) on the CPU, the last dimension contiguous.

    Returns:
        Output (results, heads, value dim) in the query's dtype and lse (results, heads), fp32; a
        result for each token of each reading, in their order.

    Raises:
        RagWindowsError: there is no kernel (`rag_windows.attention.backends.native` says when),
            or the items do not fit the query.
    """
    if not items.fit(query):
        raise RagWindowsError(
            "The CPU kernel takes a query of the items' dtype and head dim, with all their tokens."
        )
    _, heads, dim = query.shape
    value_dim = items.value_dim
    made = kernel(query.dtype, dim, value_dim)
    if made is None:
        raise RagWindowsError("There is no CPU kernel for this; ask `serves` first.")
    results, threads = len(items.order), torch.get_num_threads()
    tasks = items.readings * items.kv_heads
    splits = min(-(-threads * _SHARES // tasks), items.shares)
    output = query.new_empty(results, heads, value_dim)
    lse = query.new_empty(results, heads, dtype=torch.float32)
    work = query.new_empty(results * heads * splits * (value_dim + 2), dtype=torch.float32)
    with record_function(NAME):
        made.run(
            items.table.buffer_info()[0],
            items.settings.buffer_info()[0],
            items.readings,
            items.segments.buffer_info()[0],
            items.order.buffer_info()[0],
            results,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            items.kv_heads,
            heads // items.kv_heads,
            output.data_ptr(),
            lse.data_ptr(),
            work.data_ptr(),
            splits,
            threads,
        )
    return output, lse
