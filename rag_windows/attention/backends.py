"""What attention backends are asked and what they answer, the specification, and who answers what.

A backend is asked a list of requests at once. One that reads a single block of keys at a time, as
PyTorch's own attention does, is called block by block by `OneByOne`. The kernels that answer
several requests by one call are in `native/kernel.py` and `cuda.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from rag_windows.attention.merge import LOWEST
from rag_windows.kv import pack, unpacked

Part = tuple[torch.Tensor, torch.Tensor]
"""Keys (groups, kv heads, keys, head dim) and values (groups, kv heads, keys, value dim)."""


@dataclass(slots=True)
class AttentionRequest:
    """Attention of groups of tokens, each group over keys of its own.

    Group ``g`` is M tokens of the query, ``tokens[g * M : (g + 1) * M]``, and reads block ``g`` of
    each part. No more than one of ``causal``, ``between`` and ``mask`` is set.

    Attributes:
        parts: at least one; the keys of a group are those of all parts, one behind the other.
        peaks: of parts in 8 bits a number (`PackedTensors`), which are all or none: of each part
            the peaks of its keys (1, kv heads, 1, head dim) and of its values, in fp32.
        scale: multiplies the logits, which ``softcap`` then caps and ``temperature`` divides.
        tokens: (groups * M,) int64, on the CPU: places in the query; None for all of it, in order.
        causal: the i-th of a group's tokens sees its first i + 1 keys; only with M keys in one
            part.
        between: (groups,) int64 each, on the CPU: the first key that each group reads, and the end;
            only with one part. None for all.
        mask: bool (groups, 1, M, keys of all parts), on the query's device: True where a token sees
            a key.
    """

    parts: Sequence[Part]
    scale: float
    softcap: float | None = None
    temperature: float = 1.0
    tokens: torch.Tensor | None = None
    causal: bool = False
    between: tuple[torch.Tensor, torch.Tensor] | None = None
    mask: torch.Tensor | None = None
    peaks: Sequence[Part] | None = None

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.parts[0][0])

    @property
    def keys(self) -> int:
        """Keys of a group, in all parts."""
        return sum([key.shape[2] for key, _ in self.parts])

    def places(self, query: torch.Tensor) -> torch.Tensor:
        """The tokens as (groups * M,) int64, on the CPU, of a query (tokens, heads, head dim)."""
        return torch.arange(len(query)) if self.tokens is None else self.tokens


class AttentionAnswer(NamedTuple):
    """A result for each token of each request, in their order.

    Attributes:
        output: (results, heads, value dim), fp32 or in the query's dtype; zero where a token sees
            no key.
        lse: (results, heads), fp32 (fp64 for fp64): the log-sum-exp of the logits; ``-inf`` there.
        parts: if they are wanted, for each request (parts, tokens, heads): the log-sum-exp of each
            part's keys by themselves. A request of one part may have None: it is ``lse``.
    """

    output: torch.Tensor
    lse: torch.Tensor
    parts: list[torch.Tensor | None] | None


PreparedCall = Callable[..., AttentionAnswer]
"""Answers the requests that it was prepared for: called with a query (tokens, heads, head dim) and
``per_part``, whether the log-sum-exps of parts are wanted; for one query after the other."""


class Backend(ABC):
    """Answers attention requests on one type of device."""

    @abstractmethod
    def serves(self, request: AttentionRequest, query: torch.Tensor) -> bool:
        """Whether it answers a request correctly for a query (tokens, heads, head dim)."""

    def pays(self, requests: Sequence[AttentionRequest]) -> bool:
        """Whether one call for these requests, which may be none, is worth what it costs."""
        return True

    @abstractmethod
    def prepare(self, requests: Sequence[AttentionRequest], query: torch.Tensor) -> PreparedCall:
        """Make the call that answers requests which it serves, for queries like this one."""


PartAnswer = tuple[torch.Tensor, torch.Tensor]
"""Output (groups, heads, M, value dim) in the query's dtype and log-sum-exp (groups, heads, M) of a
query (groups, heads, M, head dim) over one part; else as in `AttentionAnswer`."""

OfPart = Callable[[torch.Tensor, Part, AttentionRequest, torch.Tensor | None], PartAnswer]
"""Answers a query over one part of a request; last comes what of the request's mask is the part's,
or None."""

MAX_MASK = 2**25
"""Rows x keys of one call with a mask: bounds the mask and, on a CPU, its bias."""


class OneByOne(Backend):
    """A backend whose function answers one part of one request at a time.

    ``fits`` says whether ``attend`` takes the parts of a request for a query.
    """

    def __init__(
        self, fits: Callable[[AttentionRequest, torch.Tensor], bool], attend: OfPart
    ) -> None:
        self._fits = fits
        self._attend = attend

    def serves(self, request: AttentionRequest, query: torch.Tensor) -> bool:
        """See `Backend.serves`."""
        return self._fits(request, query)

    def prepare(self, requests: Sequence[AttentionRequest], query: torch.Tensor) -> PreparedCall:
        """See `Backend.prepare`; there is nothing to prepare."""
        return partial(self._answers, requests)

    def _answers(
        self, requests: Sequence[AttentionRequest], query: torch.Tensor, *, per_part: bool = False
    ) -> AttentionAnswer:
        made = [self._answer(request, query, per_part=per_part) for request in requests]
        parts = [own for _, _, own in made] if per_part else None
        if len(made) == 1:
            return AttentionAnswer(made[0][0], made[0][1], parts)
        outputs, lses = [one for one, _, _ in made], [one for _, one, _ in made]
        return AttentionAnswer(torch.cat(outputs), torch.cat(lses), parts)

    def _answer(
        self, request: AttentionRequest, query: torch.Tensor, *, per_part: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Output, log-sum-exp and, if wanted and of several, log-sum-exps of the parts."""
        tokens = request.tokens
        asked = query if tokens is None else query[tokens.to(query.device)]
        asked = asked.unflatten(0, (request.groups, -1)).transpose(1, 2)
        # Parts are read where they stand: joining them would copy every key, every time.
        each = zip(parts_of(request, query.dtype), _masks(request, query), strict=True)
        made = [self._in_steps(asked, part, request, mask) for part, mask in each]
        output, lse = made[0]
        lses = None
        if len(made) > 1:
            by_part = torch.stack([one for _, one in made])
            lse = by_part.logsumexp(dim=0)
            shares = torch.exp(by_part - lse.clamp_min(LOWEST)).unsqueeze(-1)
            mixed = sum(one * share for (one, _), share in zip(made, shares, strict=True))
            output = torch.as_tensor(mixed).to(query.dtype)
            lses = by_part.transpose(2, 3).flatten(1, 2) if per_part else None
        return output.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), lses

    def _in_steps(
        self, query: torch.Tensor, part: Part, request: AttentionRequest, mask: torch.Tensor | None
    ) -> PartAnswer:
        """One part; with a mask in steps of rows, which bound the size of the mask."""
        key, value = part
        if key.dtype != query.dtype:
            # Where one of both was computed under autocast.
            part = key.to(query.dtype), value.to(query.dtype)
        if mask is None:
            return self._attend(query, part, request, None)
        groups, heads, rows, _ = query.shape
        step = max(1, MAX_MASK // (max(1, key.shape[2]) * heads * groups))
        places = [slice(at, at + step) for at in range(0, rows, step)]
        made = [self._attend(query[:, :, one], part, request, mask[:, :, one]) for one in places]
        outputs, lses = [one for one, _ in made], [one for _, one in made]
        return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def parts_of(request: AttentionRequest, dtype: torch.dtype) -> Iterator[Part]:
    """The parts as they are read, each unpacked when its turn comes."""
    if request.peaks is None:
        yield from request.parts
        return
    for (key, value), (of_key, of_value) in zip(request.parts, request.peaks, strict=True):
        yield unpacked(key, of_key, dtype), unpacked(value, of_value, dtype)


def _masks(request: AttentionRequest, query: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """For each part the mask of its keys, or None."""
    mask = request.mask
    if request.between is not None:
        first, end = (one.view(-1, 1, 1, 1).to(query.device) for one in request.between)
        keys = torch.arange(request.keys, device=query.device)
        rows = len(request.places(query)) // request.groups
        mask = ((keys >= first) & (keys < end)).expand(-1, -1, rows, -1)
    if mask is None:
        return [None] * len(request.parts)
    return mask.split([key.shape[2] for key, _ in request.parts], dim=-1)


SCORE_BYTES = 256 * 2**20
"""Largest size, in bytes, of the reference's scores of one chunk of rows."""


def _explicit(
    query: torch.Tensor, part: Part, request: AttentionRequest, mask: torch.Tensor | None
) -> PartAnswer:
    """Explicit scores in fp32 (fp64 for fp64), on any device."""
    (key, value), (groups, heads, rows, _) = part, query.shape
    kv_heads, n_keys = key.shape[1], key.shape[2]
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    wide_key, wide_value = key.to(exact).unsqueeze(2), value.to(exact).unsqueeze(2)
    step = max(1, SCORE_BYTES // (4 * groups * heads * max(n_keys, 1)))
    seen = None if mask is None else mask.unsqueeze(2)
    if request.causal:
        seen = torch.ones(rows, n_keys, dtype=torch.bool, device=query.device).tril()
    outputs, lses = [], []
    for start in range(0, rows, step):
        asked = grouped[:, :, :, start : start + step].to(exact)
        scores = asked @ wide_key.transpose(-1, -2) * request.scale
        if request.softcap is not None:
            scores = torch.tanh(scores / request.softcap) * request.softcap
        scores = scores / request.temperature
        if seen is not None:
            scores = scores.masked_fill(~seen[..., start : start + step, :], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
        outputs.append((weights @ wide_value).to(query.dtype))
        lses.append(lse)
    return torch.cat(outputs, dim=3).flatten(1, 2), torch.cat(lses, dim=3).flatten(1, 2)


CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def wants_gradients(request: AttentionRequest, query: torch.Tensor) -> bool:
    """Whether a gradient is to flow back: kernels give none of their log-sum-exps."""
    tensors = query, *(tensor for part in request.parts for tensor in part)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _fits_fused(request: AttentionRequest, query: torch.Tensor) -> bool:
    key, value = request.parts[0]
    return not wants_gradients(request, query) and (
        request.softcap is None
        and key.shape[3] == value.shape[3]
        and query.dtype in CPU_DTYPES
        and all(key.shape[2] for key, _ in request.parts)
    )


def _fused(
    query: torch.Tensor, part: Part, request: AttentionRequest, mask: torch.Tensor | None
) -> PartAnswer:
    """PyTorch's fused CPU attention."""
    shared = query.shape[1] // part[0].shape[1]
    if shared == 1 or request.causal or mask is not None:
        return _fused_heads(query, part, request, mask)
    # The kernel reads keys once for each head that it is given; as rows, heads share one reading.
    groups, heads, rows, dim = query.shape
    folded = query.reshape(groups, heads // shared, shared * rows, dim)
    output, lse = _fused_heads(folded, part, request, None)
    return output.reshape(groups, heads, rows, dim), lse.reshape(groups, heads, rows)


def _fused_heads(
    query: torch.Tensor, part: Part, request: AttentionRequest, mask: torch.Tensor | None
) -> PartAnswer:
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    # A matrix product with one bf16 vector takes twice the time of one with two columns.
    twice = query.dtype == torch.bfloat16 and query.shape[2] == 1
    twice = twice and mask is None and not request.causal
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.expand(-1, -1, 2, -1) if twice else query,
        *part,
        0.0,
        request.causal,
        attn_mask=bias,
        scale=request.scale / request.temperature,
    )
    if mask is not None:
        # The kernel reports 0 instead of -inf for a row that sees nothing.
        lse = lse.masked_fill(~mask.any(dim=-1), -torch.inf)
    return (output[:, :, :1], lse[:, :, :1]) if twice else (output, lse)


BACKENDS: dict[str, Backend] = {
    "reference": OneByOne(lambda request, query: True, _explicit),
    "cpu": OneByOne(_fits_fused, _fused),
}
"""By name. "native" and "cuda" are added where all of them are imported, in `__init__.py`."""

ORDER: dict[str, tuple[str, ...]] = {"cpu": ("native", "cpu"), "cuda": ("cuda",)}
"""For each type of device, the backends that are asked before the reference, fastest first."""


def calls_for(
    requests: Sequence[AttentionRequest], query: torch.Tensor, *, often: bool = False
) -> list[tuple[list[int], PreparedCall]]:
    """Calls that together answer all requests, each with the indices of those that it answers.

    The fastest backend of the query's device gets what it serves, if that pays, the next one what
    is left. A call that is made ``often`` costs little to prepare, so what it answers always pays.
    """
    made: list[tuple[list[int], PreparedCall]] = []
    left = list(range(len(requests)))
    for name in (*ORDER.get(query.device.type, ()), "reference"):
        backend = BACKENDS[name]
        # What is too little for a call is found faster than what is served.
        if not left or not (often or backend.pays([requests[i] for i in left])):
            continue
        serving = [i for i in left if backend.serves(requests[i], query)]
        # No call reads both kinds of numbers.
        for packed in (False, True):
            served = [i for i in serving if (requests[i].peaks is not None) == packed]
            taken = [requests[i] for i in served]
            if taken and (often or backend.pays(taken)):
                made.append((served, backend.prepare(taken, query)))
                left = [i for i in left if i not in served]
    return made


def reference(
    requests: Sequence[AttentionRequest], query: torch.Tensor, *, per_part: bool = False
) -> AttentionAnswer:
    """Answer by explicit scores: the specification of all backends."""
    return BACKENDS["reference"].prepare(requests, query)(query, per_part=per_part)


def sound(request: AttentionRequest, query: torch.Tensor) -> bool:
    """Whether a request and its query (tokens, heads, head dim) fit `AttentionRequest`.

    Shapes fit, dtypes and devices agree, nothing is read out of bounds, no part is empty, and no
    gradient is wanted. A mask is not checked: no kernel of several requests takes one.
    """
    groups, kv_heads, length, dim = request.parts[0][0].shape
    value_dim, tokens = request.parts[0][1].shape[3], request.tokens
    if query.shape[2] != dim or query.shape[1] % kv_heads:
        return False
    count = len(query) if tokens is None else len(tokens)
    if not count or count % groups:
        return False
    if tokens is not None and (
        tokens.dtype != torch.int64 or int(tokens.min()) < 0 or int(tokens.max()) >= len(query)
    ):
        return False
    if request.causal and (len(request.parts) > 1 or length != count // groups):
        return False
    if request.between is not None:
        first, end = (one.numpy() for one in request.between)
        inside = (first >= 0).all() and (first < end).all() and (end <= length).all()
        if not (inside and len(first) == len(end) == groups and len(request.parts) == 1):
            return False
    dtype = query.dtype if request.peaks is None else torch.int8
    for peaks in request.peaks or ():
        for one, size in zip(peaks, (dim, value_dim), strict=True):
            fits = one.shape == (1, kv_heads, 1, size) and one.dtype == torch.float32
            if not (fits and one.is_contiguous() and one.device == query.device):
                return False
    if request.peaks is not None and (groups > 1 or len(request.peaks) != len(request.parts)):
        return False
    for key, value in request.parts:
        if not (
            key.device == value.device == query.device
            and key.dtype == value.dtype == dtype
            and key.shape[2] > 0
            and key.shape == (groups, kv_heads, key.shape[2], dim)
            and value.shape == (groups, kv_heads, key.shape[2], value_dim)
        ):
            return False
    return not wants_gradients(request, query)


TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 3e-4
PACKED_TOLERANCE = 8e-3
"""Of log-sum-exps over parts in 8 bits a number, which a kernel may round to the query's dtype."""


def agrees(
    answer: Callable[[list[AttentionRequest], torch.Tensor], AttentionAnswer],
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    *,
    softcap: float | None,
    packed: bool = False,
) -> bool:
    """Whether a kernel answers small questions as the reference does in float64.

    They are of few and of many windows with gaps, a text that sees itself, row caches of several
    lengths, and one to 33 tokens of grouped heads; ``dims`` are those of heads and of values.
    ``answer`` gives the log-sum-exps of the parts, too. ``packed`` asks over parts in 8 bits.
    """
    tolerance = PACKED_TOLERANCE if packed else LSE_TOLERANCE
    for requests, query in _questions(device, dtype, dims, softcap):
        if packed:
            requests = [in_8_bits(one) for one in requests if one.groups == 1 and not one.causal]
        found, right = answer(requests, query), [_exact(one, query) for one in requests]
        output = torch.cat([one.output.float() for one in right])
        lse = torch.cat([one.lse.float() for one in right])
        pairs = [(found.lse, lse)]
        for own, one in zip(found.parts or (), right, strict=True):
            if own is not None:
                expected = one.parts[0] if one.parts else None
                pairs.append((own, (one.lse[None] if expected is None else expected).float()))
        if not torch.allclose(found.output.float(), output, atol=TOLERANCE[dtype]):
            return False
        if not all(torch.allclose(one, two, atol=tolerance) for one, two in pairs):
            return False
    return True


def _exact(request: AttentionRequest, query: torch.Tensor) -> AttentionAnswer:
    """The answer of the reference in fp64, whatever fp32 products or autocast are set to."""
    parts = [(key.double(), value.double()) for key, value in parts_of(request, torch.float64)]
    exact = replace(request, parts=parts, peaks=None)
    return reference([exact], query.double(), per_part=True)


def in_8_bits(request: AttentionRequest) -> AttentionRequest:
    """The same over parts in 8 bits a number, each with peaks of its own."""
    parts, peaks = [], []
    for part in request.parts:
        packed = [pack(tensor.float()) for tensor in part]
        parts.append((packed[0][0], packed[1][0]))
        peaks.append((packed[0][1], packed[1][1]))
    return replace(request, parts=parts, peaks=peaks)


def _questions(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], softcap: float | None
) -> Iterator[tuple[list[AttentionRequest], torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    # Nobody may read what is between the windows.
    memory = [torch.full((2000, 2, dim), torch.nan, dtype=dtype, device=device) for dim in dims]

    def part(first: int, length: int, groups: int = 1) -> Part:
        own = [one[first : first + length] for one in memory]
        for one in own:
            one.copy_(torch.randn(one.shape, generator=draw, dtype=torch.float32))
        key, value = (one.unflatten(0, (groups, -1)).transpose(1, 2) for one in own)
        return key, value

    few = [part(900, 130), part(0, 1), part(3, 700)]
    many = [part(1100 + 4 * i, 1 + i % 3) for i in range(150)]
    numbers = dims[0] ** -0.5, softcap
    query = torch.randn(33, 8, dims[0], generator=draw, dtype=torch.float32).to(device, dtype)
    between = torch.tensor([0, 5]), torch.tensor([20, 9])
    one, two = torch.arange(1), torch.tensor([5, 2])
    yield [AttentionRequest(few, *numbers, 1.0, one)], query
    yield [AttentionRequest(many, *numbers, 0.7, one)], query
    yield (
        [
            AttentionRequest(few, *numbers, 0.7, torch.arange(3)),
            AttentionRequest([part(1800, 33)], *numbers, causal=True),
            AttentionRequest([part(1840, 40, 2)], *numbers, tokens=two, between=between),
        ],
        query,
    )
