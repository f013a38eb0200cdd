"""Attention on CUDA devices: each window is a sequence of PyTorch's flash attention.

Windows are the splits of a split-KV decode, and their log-sum-exps give the citations. Keys are
read in place: the sequences of a call lie in one storage, begin at the tokens ``cu_seq_k`` and have
``seqused_k`` keys, whatever is between them. Soft caps are left to PyTorch's other operations.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import record_function

from rag_windows.attention.backends import (
    AttentionAnswer,
    AttentionRequest,
    Backend,
    Part,
    PreparedCall,
    agrees,
    sound,
)
from rag_windows.attention.native.build import SingleFlight
from rag_windows.attention.native.kernel import NAME
from rag_windows.attention.torch_functions import varlen
from rag_windows.errors import RagWindowsError

logger = logging.getLogger(__name__)

VARIABLE = "RAG_WINDOWS_CUDA_KERNEL"
"""Environment variable: "0" leaves all of this out."""

MAX_BYTES = 256 * 2**20
"""Temporary memory for the rows of one step of a call; a row is one token's reading of one part.
Rows of one token, or of a text that sees itself (no more than its results), stay in one step."""

MAX_ROWS = 2**15
"""Largest number of rows of a step: the kernel's grid takes at most 65,535 sequences."""

BUSY = 256
"""Sequences times kv heads that keep a GPU busy. Where they are fewer and have one row each, the
kernel folds heads itself, and cuts long sequences."""


class Functions(NamedTuple):
    """PyTorch's `varlen_attn` for a type of device, and the dtypes that it takes.

    Its log-sum-exps are (rows, heads), as documented, or (heads, rows), as kernels have it.
    """

    varlen: Callable[..., Any] = varlen
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)


DEVICES: dict[str, Functions] = {"cuda": Functions()}
"""By type of device. Tests add "cpu", so that tensors on the CPU are served here."""

Kind = tuple[Functions, torch.device, torch.dtype, int]
"""Tested before first use: functions, device, dtype and head dim."""


class CudaBackend(Backend):
    """The function as a backend. Nothing is faster, so a call always pays."""

    def serves(self, request: AttentionRequest, query: torch.Tensor) -> bool:
        """See `Backend.serves`; it takes no mask and no soft cap."""
        functions = DEVICES.get(query.device.type)
        dim, value_dim = (one.shape[3] for one in request.parts[0])
        if functions is None or os.environ.get(VARIABLE) == "0":
            return False
        if request.mask is not None or request.softcap is not None:
            return False
        if query.dtype not in functions.dtypes or dim > 256 or dim % 8 or value_dim != dim:
            return False
        kind = functions, query.device, query.dtype, dim
        return sound(request, query) and _tried(kind) is not None

    def prepare(self, requests: Sequence[AttentionRequest], query: torch.Tensor) -> PreparedCall:
        """See `Backend.prepare`."""
        return CudaCall(requests, query)


def _try(kind: Kind) -> bool | None:
    """Whether log-sum-exps come with heads first; None, with a warning, if it can't be used."""
    functions, device, dtype, dim = kind
    name = f"varlen_attn for {dtype}, {dim}, on {device}"
    try:
        some = torch.zeros(3, 2, dim, dtype=dtype, device=device)
        cut = torch.tensor([0, 3], dtype=torch.int32, device=device)
        heads_first = functions.varlen(some, some, some, cut, cut, 3, 3)[1].shape[0] == 2

        def answer(requests: list[AttentionRequest], query: torch.Tensor) -> AttentionAnswer:
            return CudaCall(requests, query, heads_first)(query, per_part=True)

        right = agrees(answer, device, dtype, (dim, dim), softcap=None)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as error:
        logger.warning("%s is left out: %s", name, error)
        return None
    if not right:
        logger.warning("%s differs from the reference and is left out.", name)
    return heads_first if right else None


_tried = SingleFlight(_try)


class CudaCall:
    """Requests of one layer that `CudaBackend` serves, answered for one query after the other."""

    def __init__(
        self,
        requests: Sequence[AttentionRequest],
        query: torch.Tensor,
        heads_first: bool | None = None,
    ) -> None:
        self.parts, lying = _lying([part for one in requests for part in one.parts])
        places = [one.places(query) for one in requests]
        self.key, self.tokens = self.parts[0][0], max(int(own.max()) for own in places) + 1
        self.sizes = [(len(one.parts), len(own)) for one, own in zip(requests, places, strict=True)]
        device, dtype, dim = self.key.device, self.key.dtype, self.key.shape[3]
        self.functions = DEVICES[device.type]
        kind = self.functions, device, dtype, dim
        self.heads_first = _tried(kind) if heads_first is None else heads_first
        shapes = tuple(
            (
                *(len(one.parts), one.groups, len(own)),
                (one.scale, one.temperature, one.causal),
                None if one.between is None else torch.stack(one.between).numpy().tobytes(),
            )
            for one, own in zip(requests, places, strict=True)
        )
        order = np.concatenate([own.numpy() for own in places]).tobytes()
        self._asked = shapes, order, lying.tobytes(), device
        self._plans: dict[int, _Plan] = {}

    def __call__(self, query: torch.Tensor, *, per_part: bool = False) -> AttentionAnswer:
        """See `PreparedCall`."""
        key, (tokens, heads, dim) = self.key, query.shape
        fits = query.dtype == key.dtype and query.device == key.device and dim == key.shape[3]
        if not fits or tokens < self.tokens or heads % key.shape[1]:
            raise RagWindowsError(
                "The CUDA kernel got another query than it was made for. This is a bug in "
                "rag-windows: please report it."
            )
        (steps, back, places), made, own = self.plan(heads), [], []
        with record_function(NAME):
            for runs, merges in steps:
                asked = (self._rows(run, query) for run in runs)
                rows = [_joined(each) for each in zip(*asked, strict=True)]
                made += [_merged(rows, *merge) for merge in merges]
                own.append(rows[1])
            # Until here heads are (kv heads, heads of each).
            output, lse = (_joined(each) for each in zip(*made, strict=True))
            output, lse = (_picked(each, back).flatten(1, 2) for each in (output, lse))
            if not per_part:
                return AttentionAnswer(output, lse, None)
            whole = _picked(_joined(own), places).flatten(1, 2)
            parts = whole.split([one * tokens for one, tokens in self.sizes])
            sized = zip(parts, self.sizes, strict=True)
            return AttentionAnswer(output, lse, [one.unflatten(0, size) for one, size in sized])

    def plan(self, heads: int) -> _Plan:
        """The plan of a call, made once for all layers whose keys have the same layout."""
        if heads not in self._plans:
            _, kv_heads, _, dim = self.key.shape
            row = heads * (dim * (3 * self.key.element_size() + 4) + 16)
            most = min(max(1, MAX_BYTES // row), MAX_ROWS)
            self._plans[heads] = _plan(*self._asked, (kv_heads, heads // kv_heads, dim), most)
        return self._plans[heads]

    def _rows(self, run: _Run, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (rows, kv heads, heads of each, dim) and log-sum-exp of each row, by one call."""
        part = zip(self.parts[run.part], run.views, strict=True)
        key, value = (tensor.as_strided(*view) for tensor, view in part)
        shape = key.shape[1], query.shape[1] // key.shape[1]
        # Folded, the query heads of a kv head are rows, which read its keys once.
        asked = query.unflatten(1, shape).transpose(1, 2) if run.folded else query
        asked = asked.index_select(0, run.rows).flatten(0, asked.dim() - 3)
        output, lse = self.functions.varlen(asked, key, value, **run.options)
        lse = lse.T if self.heads_first else lse
        if not run.folded:
            return output.unflatten(1, shape), lse.unflatten(1, shape)
        output, lse = (one.unflatten(0, (-1, shape[1])).transpose(1, 2) for one in (output, lse))
        return output, lse


def _lying(parts: Sequence[Part]) -> tuple[Sequence[Part], np.ndarray]:
    """Parts, and for each (11,) int64: storage, offset and strides of keys, then values; and keys.

    Tensors that can't be loaded 16 bytes at a time are copied.
    """
    (_, kv_heads, _, dim), size = parts[0][0].shape, parts[0][0].element_size()
    each, lengths = [one for part in parts for one in part], [key.shape[2] for key, _ in parts]
    made: list[Any] = [(one.data_ptr(), one.storage_offset(), *one.stride()) for one in each]
    storages: dict[int, int] = {}
    places = [storages.setdefault(one[0] - one[1] * size, len(storages)) for one in made]
    table = np.array(made, dtype=np.int64)
    # The stride of a dimension of size 1 may be any number.
    if all(len(key) == 1 for key, _ in parts):
        table[:, 2] = dim
    if kv_heads == 1:
        table[:, 3] = dim
    if 1 in lengths:
        pairs, most = table.reshape(len(parts), 2, -1), max(lengths)
        usual = pairs[lengths.index(most), :, 4] if most > 1 else dim
        pairs[np.array(lengths) == 1, :, 4] = usual
    loaded = np.bitwise_or.reduce(table[:, 2:5], axis=1) * size | table[:, 0]
    odd = (loaded % 16 != 0) | (table[:, 4] == 0) | (table[:, 5] != 1)
    if odd.any():
        for at in np.flatnonzero(odd):
            each[at] = each[at].clone(memory_format=torch.contiguous_format)
        return _lying([*zip(each[::2], each[1::2], strict=True)])
    table[:, 0] = places
    return parts, np.column_stack([table[:, :5].reshape(-1, 10), lengths])


def _merged(
    made: Sequence[torch.Tensor], columns: int, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of ``columns`` rows each, merged by softmax in fp32."""
    output, lse = (_picked(one, rows) for one in made)
    if columns == 1:
        return output, lse
    lses = lse.unflatten(0, (columns, -1))
    weights = lses.softmax(dim=0).unsqueeze(-1)
    mixed = (output.unflatten(0, (columns, -1)) * weights).sum(dim=0)
    return mixed, lses.logsumexp(dim=0)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])


def _picked(tensor: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    return tensor if places is None else tensor.index_select(0, places)


class _Run(NamedTuple):
    """One call: views of a part's storage, the rows' tokens."""

    part: int
    views: list[Any]
    rows: torch.Tensor
    folded: bool
    options: dict[str, Any]


_Step = tuple[list[_Run], list[tuple[int, torch.Tensor | None]]]
"""Runs; and, for each number of rows that a result may have, the indices of these rows."""

_Plan = tuple[list[_Step], torch.Tensor | None, torch.Tensor | None]
"""Steps; the places of results in their outputs; and those of rows by request, part and token."""


def _tables(shapes: tuple[Any, ...], places: bytes) -> Iterator[np.ndarray]:
    """For each request (15, rows) int64, in the order of parts and tokens.

    0: what is asked; storage, strides of heads and keys, and remainder of the offset, 1: of keys,
    5: of values; 9: how much later values start. 10: where the sequence starts; 11: its keys;
    12: its text, where it is one that sees itself; 13: the part; 14: the result.
    """
    kinds, part, result = [shape[3] for shape in shapes], 0, 0
    lie = np.frombuffer(places, np.int64).reshape(-1, 11)
    for parts, groups, tokens, kind, between in shapes:
        own, group = lie[part : part + parts].T[:, :, None], np.arange(groups)
        begin, length = np.zeros_like(group), own[10]
        if between is not None:
            begin, end = np.frombuffer(between, np.int64).reshape(2, -1)
            length = end - begin
        layout, starts = [kinds.index(kind)], []
        for storage, offset, by_group, by_head, by_key in (own[:5], own[5:10]):
            start, rest = np.divmod(offset + group * by_group + begin * by_key, by_key)
            layout += [storage, by_head, by_key, rest]
            starts.append(start)
        text = result + group * (tokens // groups) if kind[2] else -1
        of_sequences = starts[1] - starts[0], starts[0], length, text
        columns = *layout, *of_sequences, part + np.arange(parts)[:, None]
        each = np.stack(np.broadcast_arrays(*columns)).repeat(tokens // groups, axis=2)
        results = np.tile(np.arange(result, result + tokens), parts)
        yield np.append(each.reshape(len(columns), -1), [results], axis=0)
        part, result = part + parts, result + tokens


@lru_cache(maxsize=64)
def _plan(
    shapes: tuple[Any, ...],
    order: bytes,
    lying: bytes,
    device: torch.device,
    sizes: Any,
    most: int,
) -> _Plan:
    table, on = np.concatenate([*_tables(shapes, lying)], axis=1), partial(_on, device=device)
    # All results of a text belong to the step of its first.
    step = (np.bincount(table[14]).cumsum() - 1) // most
    step = step[np.where(table[12] < 0, table[14], table[12])]
    by = np.lexsort((table[14], *table[12::-1], step))
    table, step, tokens = table[:, by], step[by], np.frombuffer(order, np.int64)
    differs = np.append(np.ones((13, 1), bool), table[:13, 1:] != table[:13, :-1], axis=1)
    begins = np.append(True, step[1:] != step[:-1])
    sequence = differs.any(axis=0) | begins
    # Overlapping sequences take several calls: ``cu_seq_k`` may not decrease.
    over = np.append(False, table[10, 1:] < (table[10] + table[11])[:-1])
    run, steps, back = differs[:10].any(axis=0) | begins | (sequence & over), [], []
    if len(np.unique(table[14] * len(run) + run.cumsum())) == table[14].max() + 1:
        # No result has rows of several runs, so runs need not be joined.
        begins = run
    for first, end in pairwise([*np.flatnonzero(begins).tolist(), len(step)]):
        cuts, runs, merges = first + np.flatnonzero(run[first:end]), [], []
        for one, two in pairwise([*cuts.tolist(), end]):
            rows, kind = tokens[table[14, one:two]], shapes[table[0, one]][3]
            runs.append(_run(table[:, one:two], sequence[one:two], rows, kind, sizes, on))
        results, of_rows, counts = np.unique(
            table[14, first:end], return_inverse=True, return_counts=True
        )
        by_result, firsts = of_rows.argsort(kind="stable"), counts.cumsum() - counts
        for columns in np.unique(counts).tolist():
            these = np.flatnonzero(counts == columns)
            own = by_result[firsts[these] + np.arange(columns)[:, None]].ravel()
            merges.append((columns, on(own, of=end - first)))
            back.append(results[these])
        steps.append((runs, merges))
    places = np.concatenate(back).argsort()
    return steps, on(places, of=len(places)), on(by.argsort(), of=len(by))


def _run(
    table: np.ndarray, sequence: np.ndarray, tokens: np.ndarray, kind: Any, sizes: Any, on: Any
) -> _Run:
    """The call of rows of sequences that lie side by side; ``sequence`` marks where each begins."""
    (kv_heads, groups, dim), (scale, temperature, causal) = sizes, kind
    layout, at = table[:, 0].tolist(), np.flatnonzero(sequence)
    starts, lengths, readers = *table[10:12, at], np.diff(np.append(at, len(tokens)))
    ends, base = readers.cumsum(), layout[10]
    total, rows = int(starts[-1] + lengths[-1]) - base, on(tokens)
    views = [
        ((total, kv_heads, dim), (by_key, by_head, 1), rest + first * by_key)
        for (by_head, by_key, rest), first in ((layout[2:5], base), (layout[6:9], base + layout[9]))
    ]
    most = int(readers.max())
    folded = not causal and groups > 1 and (most > 1 or len(at) * kv_heads >= BUSY)
    by = groups if folded else 1
    options = {
        "cu_seq_q": on(np.append(0, ends) * by),
        "cu_seq_k": on(np.append(starts - base, total)),
        "max_q": most * by,
        "max_k": int(lengths.max()),
        "scale": scale / temperature,
        "window_size": (-1, 0) if causal else (-1, -1),
        "enable_gqa": groups > by,
        "seqused_k": on(lengths),
    }
    return _Run(layout[13], views, rows, folded, options)


def _on(places: np.ndarray, device: torch.device, of: int | None = None) -> Any:
    """Places on a device, int32; None where they are 0 to ``of`` - 1, in order."""
    if len(places) == of and (places == np.arange(of)).all():
        return None
    return torch.from_numpy(places.astype(np.int32)).to(device)
