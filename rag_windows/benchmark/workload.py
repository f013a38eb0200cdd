"""What is timed: a model, the tokens that it reads, and the ways to answer over them."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
)

from rag_windows.benchmark.result import COLD, DISK, MEMORY, PREFIX_KEPT, SEQUENTIAL, WAYS, Place
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.errors import InputError
from rag_windows.loading import load as load_model
from rag_windows.loading import load_config
from rag_windows.methods import resolve
from rag_windows.model import WindowedLM

PREFIX_TOKENS = QUERY_TOKENS = 32
_POSITIONS = 262_144
_SIZE = "64GiB"
"""Of the caches: nothing is ever evicted."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama-0.25b": {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "qwen-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
"""Configurations whose weights are drawn at random; "tiny" is for tests and says nothing about
speed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        shape: of a model of random weights, one of `SHAPES`.
        model: name or folder of a trained one, which is timed instead; or None.
        dtype: its precision.
        device: where it runs.
        contexts: tokens of all windows.
        windows: tokens of each window.
        ragged: whether windows of different lengths are run, too.
        tokens: numbers of new tokens to whose end time is taken.
        rounds: of each way over each context.
        ways: which of `WAYS`.
        method: of the windows.
        against: further methods, which decode over the same windows in rounds of their own.
        questions: numbers of questions that are asked at once, over the first window length.
        question_context: tokens of each of them; the first context if None.
        slow_above: over longer contexts, plain transformers does less; None for never.
        slow_rounds: its rounds there.
        slow_tokens: its new tokens there.
        memory: whether peak memory is measured, for which a process of its own answers.
        profile: whether the time of a decode step is taken apart, on the CPU alone.
    """

    shape: str = "llama-0.25b"
    model: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    contexts: tuple[int, ...] = (8192,)
    windows: tuple[int, ...] = (256,)
    ragged: bool = False
    tokens: tuple[int, ...] = (64,)
    rounds: int = 5
    ways: tuple[str, ...] = WAYS
    method: str = "ape"
    against: tuple[str, ...] = ()
    questions: tuple[int, ...] = ()
    question_context: int | None = None
    slow_above: int | None = None
    slow_rounds: int = 1
    slow_tokens: int = 16
    memory: bool = True
    profile: bool = False

    @property
    def places(self) -> Iterator[Place]:
        """What is read, in the order in which it is run."""
        for context in self.contexts:
            for window in self.windows:
                for ragged in (False, True)[: 1 + self.ragged]:
                    yield Place(context, window, ragged)

    def check(self) -> None:
        """Refuse before any work what would fail behind it.

        Raises:
            InputError: an unknown shape, way or method, windows that don't divide a context, a
                context that is longer than the model, or a profile off the CPU.
        """
        config = self.config()
        for method in (self.method, *self.against):
            resolve(method)
        if unknown := [way for way in self.ways if way not in WAYS]:
            raise InputError(f"--way {unknown[0]!r} is unknown; choose among {list(WAYS)}.")
        for place in self.places:
            lengths(place, seed=0)
        if self.question_context is not None:
            lengths(Place(self.question_context, self.windows[0], ragged=False), seed=0)
        if self.profile and self.device != "cpu":
            raise InputError("--profile takes a token apart on the CPU alone; leave it out.")
        if self.model is None:
            return
        positions = getattr(config, "max_position_embeddings", None)
        longest = max((*self.contexts, self.question_context or 0))
        whole = longest + PREFIX_TOKENS + QUERY_TOKENS + max(self.tokens)
        if positions is not None and whole > positions:
            raise InputError(
                f"{self.model} has {positions} positions, and transformers' one prompt over "
                f"{longest} tokens takes {whole}; take a shorter --context."
            )

    def config(self) -> PreTrainedConfig:
        """The configuration of what is timed.

        Raises:
            InputError: there is no shape of this name.
        """
        if self.model is not None:
            return load_config(self.model).get_text_config(decoder=True)
        if self.shape not in SHAPES:
            raise InputError(
                f"{self.shape!r} is no shape of the benchmark; choose among {sorted(SHAPES)}."
            )
        return AutoConfig.for_model(
            **SHAPES[self.shape],
            max_position_embeddings=_POSITIONS,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )

    def build(self) -> PreTrainedModel:
        """The model, in evaluation mode, on its device and in its precision."""
        dtype = getattr(torch, self.dtype)
        if self.model is not None:
            model, _ = load_model(self.model, None, dtype=dtype, device_map=self.device)
            return model.eval()
        torch.manual_seed(0)
        with torch.device(self.device):
            made: PreTrainedModel = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
        return made.eval()

    def slow(self, way: str, context: int) -> bool:
        """Whether a way does less over so many tokens."""
        above = self.slow_above is not None and context > self.slow_above
        return above and way in (SEQUENTIAL, PREFIX_KEPT)

    def effort(self, way: str, context: int) -> tuple[int, int]:
        """In how many rounds a way takes part, and how many new tokens it makes."""
        if self.slow(way, context):
            return min(self.rounds, self.slow_rounds), min(max(self.tokens), self.slow_tokens)
        return self.rounds, max(self.tokens)


def head_dim(config: PreTrainedConfig) -> int:
    """Of keys and values."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, all layers."""
    config = model.config.get_text_config(decoder=True)
    numbers = config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim(config)
    return int(numbers * next(model.parameters()).element_size())


@dataclass(frozen=True, slots=True)
class Load:
    """One prompt of random tokens: a prefix, windows and a query."""

    prefix: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]

    @property
    def prompt(self) -> list[int]:
        """The same as one text."""
        return [*self.prefix, *(token for ids in self.windows for token in ids), *self.query]


def lengths(place: Place, seed: int) -> list[int]:
    """Tokens of each window; ragged ones are between half and one and a half times as long.

    Raises:
        InputError: the context is no multiple of the window.
    """
    context, window = place.context, place.window
    if window < 2 or context < window or context % window:
        raise InputError(
            f"A context of {context} tokens can't be cut into windows of {window}; take multiples."
        )
    count = context // window
    if not place.ragged or count == 1:
        return [window] * count
    generator = torch.Generator().manual_seed(seed)
    wanted = (torch.rand(count, generator=generator) + 0.5) * window
    made = [int(one) for one in wanted * context / wanted.sum()]
    made[0] += context - sum(made)
    return made


def load(vocabulary: int, place: Place, seed: int = 0) -> Load:
    """Random tokens, without the first ones, which may be control tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        first = min(300, vocabulary // 2)
        return tuple(torch.randint(first, vocabulary, (count,), generator=generator).tolist())

    windows = tuple(ids(size) for size in lengths(place, seed))
    return Load(ids(PREFIX_TOKENS), windows, ids(QUERY_TOKENS))


SHORT = Place(32, 16, ragged=False)
"""What warms everything up that is loaded and started on the first use."""


def sharing(vocabulary: int, questions: int, place: Place) -> list[Load]:
    """Prompts of which any two share half of their windows, in different orders."""
    base = load(vocabulary, place)
    common = base.windows[: len(base.windows) // 2]
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(questions):
        own = load(vocabulary, place, seed=1 + number)
        windows = [*common, *own.windows[len(common) :]]
        order = torch.randperm(len(windows), generator=generator).tolist()
        made.append(Load(base.prefix, tuple(windows[i] for i in order), own.query))
    return made


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock(StoppingCriteria):
    """Writes down when each token is there; never stops anything."""

    def __init__(self) -> None:
        synchronize()
        self.begun = time.perf_counter()
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by transformers after every token."""
        synchronize()
        self.stamps.append(time.perf_counter() - self.begun)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of one way.

    Attributes:
        prefill_s: seconds for the passages, before the query is read; to the first token where a
            way reads both as one prompt.
        stamps: seconds from the start to each generated token.
    """

    prefill_s: float
    stamps: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, by the second."""
        return (len(self.stamps) - 1) / (self.stamps[-1] - self.stamps[0])


Way = Callable[[Load, int], Timing]
"""From a prompt and a number of tokens to when they came."""


def plain(model: PreTrainedModel, *, keep_prefix: bool = False) -> Way:
    """Everything as one prompt through ``generate``: what most users run.

    Args:
        model: without our attention.
        keep_prefix: whether the prefix's keys and values are kept; passages still stand behind it.
    """
    kept: dict[tuple[int, ...], DynamicCache] = {}

    def run(load: Load, tokens: int) -> Timing:
        options: dict[str, Any] = {}
        if keep_prefix:
            if load.prefix not in kept:
                ids = torch.tensor([load.prefix], device=model.device)
                with torch.no_grad():
                    kept[load.prefix] = model(ids, use_cache=True).past_key_values
            options["past_key_values"] = copy.deepcopy(kept[load.prefix])
        prompt = torch.tensor([load.prompt], device=model.device)
        clock = Clock()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=[clock],
            **options,
        )
        return Timing(clock.stamps[0], tuple(clock.stamps))

    return run


def windowed(lm: WindowedLM) -> Way:
    """Windows by a model with the cache that it has."""

    def run(load: Load, tokens: int) -> Timing:
        clock = Clock()
        context = lm.encode_ids(load.prefix, load.windows)
        synchronize()
        prefill_s = time.perf_counter() - clock.begun
        lm.generate_ids(
            context,
            load.query,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            stopping_criteria=[clock],
        )
        return Timing(prefill_s, tuple(clock.stamps))

    return run


@contextmanager
def all_ways(lm: WindowedLM, *, device: bool) -> Iterator[dict[str, Way]]:
    """Every way by name, and a folder for the disk's that is gone afterwards.

    Args:
        lm: without a cache.
        device: whether the warm windows are kept on the accelerator, too.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rag-windows-bench-")))
        memory = PassageCache(_SIZE, device=_SIZE) if device else PassageCache(_SIZE)
        stack.callback(memory.close)
        disk = PassageCache(None, disk=_SIZE, path=folder / "windows")
        stack.callback(disk.close)
        yield {
            SEQUENTIAL: plain(lm.model),
            PREFIX_KEPT: plain(lm.model, keep_prefix=True),
            COLD: windowed(lm),
            MEMORY: windowed(lm.with_cache(memory)),
            DISK: windowed(lm.with_cache(disk)),
        }
