"""How much memory questions need, and how much of it there is for them."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from pydantic import ByteSize
from transformers.configuration_utils import get_head_shapes

from rag_windows.cache.passage_cache import PassageCache, Size, free_memory, parse_size
from rag_windows.engine import Engine
from rag_windows.errors import LimitError
from rag_windows.loading import input_device, layer_devices
from rag_windows.methods import QueryLikelihood
from rag_windows.prefill import PASS_TOKENS
from rag_windows.request import Request
from rag_windows.steps.ensemble import MAX_LOGITS
from rag_windows.steps.likelihood import MOST_TOKENS
from rag_windows.windows import Wanted

DEFAULT_SHARE = "75%"
"""Share of the memory that is free when the first of a batch's questions is asked."""

FIRST_TOKENS = 64
"""Initial capacity of a batch's KV caches, in tokens."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a question needs memory for, in tokens.

    Attributes:
        own: of its own KV cache in the end; those of each row, where it takes several.
        fed: of its first forward pass: the query, or the whole prompt where there are no windows.
        new: generated ones, at most.
        windows: of the prefix, if windows stand behind one, and of each window.
        anew: of prefix and windows, where they are encoded again for this question only.
        refined: whether passes refine its windows, with states in fp32.
        rows: of a forward pass that it takes.
        passes: of each window with the tokens that it sees in front of itself while it is encoded;
            empty where those are none.
        removals: passages that are left out of it afterwards, for which query and answer run again.
        states: of the model's own cache, those of windows and of the rows that go on from it.
    """

    own: int
    fed: int
    new: int
    windows: tuple[int, ...] = ()
    anew: int = 0
    refined: bool = False
    rows: int = 1
    passes: tuple[int, ...] = ()
    removals: int = 0
    states: int = 0


def need_of(request: Request, sequences: int = 1) -> Need:
    """What a request needs; ``sequences``, such as beams, are generated at once."""
    prefix, query = len(request.parts.prefix_ids), len(request.parts.query_ids)
    new, method = request.max_new_tokens, request.plan.method
    windows = [len(window.ids) for window in request.plan.windows]
    if not windows:
        # Nothing else holds the prefix. The last token is not fed any more.
        return Need(prefix + query + new - 1, prefix + query, new, rows=sequences)
    seen = [len(window.before) for window in request.plan.windows]
    own, rows, anew = query + new - 1, sequences, 0
    states = 0
    if request.engine.in_rows:
        # A row's own cache holds a copy of its window, or of those that it reads as one.
        chosen = windows
        if isinstance(method.selection, QueryLikelihood) and method.combination is None:
            chosen = sorted(windows)[-method.selection.retrieve :]
        own += max(windows) if method.combination is not None else sum(chosen)
        states = 2 * len(windows) + 1 + sequences
    if method.recompute is not None:
        anew = prefix + sum(windows)
    if method.combination is not None:
        # Each window answers in a row of its own, whose cache holds the prefix, too.
        own, rows = own + prefix, sequences * (len(windows) + method.combination.prior)
    elif isinstance(method.selection, QueryLikelihood):
        # Before it is answered, the query is read in a row of each window, with the prefix.
        chosen = sorted(windows)[-method.selection.retrieve :]
        row = prefix + min(query, MOST_TOKENS) + (max(windows) if states else 0)
        anew = (len(windows) + 1) * row + sum(chosen)
    return Need(
        own,
        query,
        new,
        windows=(*([prefix] if prefix else []), *windows),
        anew=anew,
        refined=method.refinement is not None,
        rows=rows,
        passes=tuple(map(sum, zip(seen, windows, strict=True))) if any(seen) else (),
        removals=0 if request.removals is None else len(request.passages),
        states=states,
    )


class Sizes:
    """What tokens take on a model, in bytes.

    Attributes:
        token: keys and values of one token in all layers.
        by_device: those of the layers on each device.
        state: the states of the model's own cache behind a text.
    """

    def __init__(self, engine: Engine) -> None:
        model, encoder = engine.model, engine.plain_encoder
        config = model.config.get_text_config(decoder=True)
        layers, number = int(config.num_hidden_layers), model.dtype.itemsize
        self.by_device: dict[torch.device, int] = {}
        self.state, widest = 0, 0
        if encoder.form is not None:
            # Tokens of a model that has states alone count, too: memory is shared by them.
            sizes = encoder.form.token_bytes
            self.by_device = {device: max(1, size) for device, size in sizes.items()}
            self.state = encoder.form.state_bytes
        else:
            heads, dims = (
                one if isinstance(one, list) else [one] * layers for one in get_head_shapes(config)
            )
            widest = max(dims)
            # Layers that read the cache of another one have none in some versions' lists.
            for device, count, dim in zip(layer_devices(model), heads, dims, strict=False):
                taken = self.by_device.get(device, 0) + 2 * count * dim * number
                self.by_device[device] = taken
        self.token = sum(self.by_device.values())
        self._layers = layers
        self._pass_tokens = PASS_TOKENS[input_device(model).type != "cpu"]
        self._encoder_tokens = encoder.pass_tokens
        # One layer at a time: what goes through it, in several forms, and what its MLP makes of it.
        attention = int(getattr(config, "num_attention_heads", None) or 1) * widest
        width = max(int(config.hidden_size), attention)
        inner = getattr(config, "intermediate_size", None) or 4 * width
        inner = max(inner) if isinstance(inner, Sequence) else int(inner)
        experts = int(getattr(config, "num_experts_per_tok", None) or 1)
        self._fed_token = number * (8 * width + experts * (2 * width + 4 * inner))
        # Logits in the model's dtype, in fp32, and what processors make of them.
        self._logit = number + 12
        self._row = int(config.vocab_size) * self._logit

    def batch(self, needs: Sequence[Need], windows: int, capacity: tuple[int, int]) -> int:
        """What questions of one batch take together.

        Its rows have KV caches as long as the longest; both rows and tokens double when they grow.

        Args:
            needs: at least one.
            windows: tokens of prefixes and windows that are not in memory yet.
            capacity: rows and tokens that the KV caches hold without growing.
        """
        rows, tokens = capacity[0], capacity[1] or FIRST_TOKENS
        count, longest = len(needs), max(need.own for need in needs)
        if count > rows:
            rows = max(count, 2 * rows, 2 * (count - 1))
        if longest > tokens:
            tokens = 2 * longest
        return self._whole(needs, windows, rows * tokens)

    def exclusive(self, need: Need, windows: int) -> int:
        """What a question takes that is answered by itself; ``windows`` as in `batch`."""
        return self._whole([need], windows, need.rows * need.own)

    def _whole(self, needs: Sequence[Need], windows: int, cached: int) -> int:
        anew = sum(need.anew for need in needs)
        # A layer whose cache grows is there twice for a moment.
        stored = self.token * (windows + anew + cached + cached // self._layers)
        stored += self.state * sum(need.states for need in needs)
        return stored + self.pass_of(needs, windows)

    def pass_of(self, needs: Sequence[Need], windows: int) -> int:
        """A bound for what the largest of their forward passes takes beside what stays of it."""
        passes = [0]
        for need in needs:
            # What windows see in front of themselves runs with them, though it is not stored.
            run = need.passes or need.windows
            most = sum(run) if need.passes and windows else windows
            longest = min(max(self._encoder_tokens, *run, 0), sum(run), most)
            # Refining holds each number in fp32, and with momentum its speed, too.
            stored = self.token * (8 if need.refined else 1)
            passes.append(max(longest, need.anew) * (self._fed_token + stored))
        fed = [need.fed * need.rows for need in needs]
        together = min(sum(fed), max(self._pass_tokens, *fed))
        passes.append(together * (self._fed_token + self.token))
        logits = sum(need.rows for need in needs) * self._row
        for need in needs:
            if need.removals:
                again = need.fed + need.new
                rows = min(need.removals + 2, max(1, self._pass_tokens // again))
                passes.append(rows * again * (self._fed_token + self.token))
                logits = max(logits, min(rows * need.new * self._row, MAX_LOGITS * self._logit))
        return max(passes) + logits


class Budget:
    """Memory that questions of one model may take: a batch, and those answered exclusively.

    Several threads may use one.

    Attributes:
        limit: bytes; None for no bound, where it is unknown how much is free.
        sizes: what tokens take.
        changes: how often memory was taken or released.
    """

    sizes: Sizes
    limit: int | None

    def __init__(self, engine: Engine, max_bytes: Size | None) -> None:
        if max_bytes is not None:
            parse_size(max_bytes, "max_bytes", 1 << 40)
        self._engine, self._max_bytes = engine, max_bytes
        self._lock = threading.Lock()
        self._taken: dict[Hashable, int] = {}
        self.changes = 0

    def begin(self) -> None:
        """Measure how much is free and what tokens take: at first, and while nobody holds any."""
        self.sizes = Sizes(self._engine)
        # An accelerator's tier takes all of its memory when it is first asked.
        self.missing(self._engine.cache, ())
        free, given = self._free(), self._max_bytes
        self.limit = None
        if given is not None or free is not None:
            share = DEFAULT_SHARE if given is None else given
            self.limit = parse_size(share, "max_bytes", None if free is None else max(2, free))

    def missing(self, cache: PassageCache | None, reads: Iterable[Wanted]) -> list[Wanted]:
        """Those that still need memory: the cache does not hold them in the form that is read."""
        reads, held = [*reads], set[str]()
        if cache is not None and len(self.sizes.by_device) == 1:
            held = cache.held({one.name for one in reads if one.name}, *self.sizes.by_device)
        return [one for one in reads if one.name not in held]

    def _free(self) -> int | None:
        """Bytes for keys and values of whole tokens, each layer's on its device; None if unknown.

        What PyTorch holds of an accelerator's memory without using it is free as well.
        """
        found = []
        for device, taken in self.sizes.by_device.items():
            if device.type == "cuda":
                free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
                free -= torch.cuda.memory_allocated(device)
            elif device.type == "cpu":
                free = free_memory()
            else:
                return None
            found.append(free * self.sizes.token // taken)
        return min(found)

    def take(self, holder: Hashable, size: int, *, force: bool = False) -> bool:
        """Reserve memory in place of what a holder has; whether there was enough.

        Args:
            holder: who reserves it.
            size: in bytes.
            force: reserve it even if there is not enough.
        """
        with self._lock:
            if not force and not self._fits(holder, size):
                return False
            self._taken[holder] = size
            self.changes += 1
            return True

    def release(self, holder: Hashable) -> None:
        """Release all memory of a holder."""
        with self._lock:
            if self._taken.pop(holder, None) is not None:
                self.changes += 1

    def fits(self, holder: Hashable, size: int) -> bool:
        """Whether a holder could reserve so much."""
        with self._lock:
            return self._fits(holder, size)

    def could_fit(self, size: int) -> bool:
        """Whether so much fits while nobody else holds any."""
        return self.limit is None or size <= self.limit

    def _fits(self, holder: Hashable, size: int) -> bool:
        others = sum(taken for one, taken in self._taken.items() if one is not holder)
        return self.could_fit(others + size)

    @property
    def taken(self) -> int:
        """Bytes that are taken."""
        with self._lock:
            return sum(self._taken.values())

    def refusal(self, need: Need, windows: int, size: int) -> LimitError:
        """Why a question that needs so many bytes can't be answered; ``windows`` as in `Sizes`."""
        share = DEFAULT_SHARE if self._max_bytes is None else str(self._max_bytes)
        free = f" ({share} of what was free)" if "%" in share else ""
        caches = "its KV cache" if need.rows == 1 else f"each of its {need.rows} KV caches"
        return LimitError(
            f"This question needs {_text(size)} of memory, but the questions that are answered at "
            f"a time may take {_text(self.limit or 0)}{free}. It has {windows} tokens of prefix "
            f"and passages that are not in memory yet, and {caches}, which grows by doubling, has "
            f"room for {need.own} ({need.new} of them new). A token takes "
            f"{_text(self.sizes.token)}, and the largest forward pass "
            f"{_text(self.sizes.pass_of([need], windows))}. Give fewer or shorter passages, ask "
            "for fewer new tokens, or raise max_bytes (batch_bytes in LangChain and LlamaIndex)."
        )


def _text(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")
