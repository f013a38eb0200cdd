"""The guard: reads passages in one prompt where windows are likely to answer worse, and reports it.

docs/which_method.md says when to use it, benchmarks/results/guard.md what each signal is worth. The
guard knows nothing of a request but its windows and its query; a question asks it, and is answered
as it chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import StoppingCriteria

from rag_windows.errors import InputError
from rag_windows.generate import Decoder
from rag_windows.kv import Windows
from rag_windows.passage import WindowTokens
from rag_windows.prefill import EncodedContext
from rag_windows.results import Fallback
from rag_windows.sampling import whole_number


@dataclass(frozen=True, slots=True)
class Guard:
    """What makes ``fallback=`` read the passages one after the other instead of in windows.

    One signal is enough; `Generation.fallback` names the first one that was found.

    Attributes:
        passages, tokens: signal "few short passages": at most this many passages with at most this
            many tokens together are read one after the other, before anything is encoded. 0
            passages switch the signal off.
        spread: signal "multi-hop": the attention of the first answer tokens is spread over several
            passages by more than this, see `attention_spread`. None switches it off.
        rows: number of answer tokens that are generated, and thrown away, to measure attention.

    Raises:
        InputError: a number is out of range.
    """

    passages: int = 4
    tokens: int = 1024
    spread: float | None = None
    rows: int = 32

    def __post_init__(self) -> None:
        for name, least in (("passages", 0), ("tokens", 0), ("rows", 1)):
            whole_number(f"Guard {name}", getattr(self, name), least)
        spread = self.spread
        if spread is not None and (
            isinstance(spread, bool)
            or not isinstance(spread, int | float)
            or not spread >= 0  # NaN is not, either
        ):
            raise InputError(
                f"Guard spread must be None or a number of at least 0, not {spread!r}."
            )


FallbackOption = Literal["sequential"] | Guard | None
"""What ``fallback=`` takes: "sequential" is a `Guard` with its defaults."""


def guard_of(option: FallbackOption | Mapping[str, Any]) -> Guard | None:
    """The guard that ``fallback=`` asks for: "sequential", a `Guard`, or its fields.

    Raises:
        InputError: it is none of them.
    """
    if option is None or isinstance(option, Guard):
        return option
    try:
        return Guard() if option == "sequential" else Guard(**option)
    except TypeError as error:
        raise InputError(
            f"fallback must be None, 'sequential' or a Guard, not {option!r}: {error}."
        ) from error


def few_short_passages(guard: Guard, windows: Sequence[WindowTokens]) -> Fallback | None:
    """The signal "few short passages"; costs nothing."""
    passages = len({window.passage for window in windows})
    tokens = sum(len(window.ids) for window in windows)
    if passages > guard.passages or tokens > guard.tokens:
        return None
    reason = (
        f"there are only {passages} passages with {tokens} tokens together (the limits are "
        f"{guard.passages} and {guard.tokens})"
    )
    return Fallback("few short passages", float(tokens), float(guard.tokens), True, reason)


def multi_hop(
    guard: Guard,
    decoder: Decoder,
    context: EncodedContext,
    query_ids: Sequence[int],
    stopping: Sequence[StoppingCriteria],
) -> Fallback | None:
    """The signal "multi-hop", from the attention of at most ``guard.rows`` greedy answer tokens.

    Where windows answer each for itself there is no attention to measure, and the guard stays
    silent. The tokens are thrown away.
    """
    if guard.spread is None or not isinstance(context.windows, Windows):
        return None
    options = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
    decoded = decoder.generate(
        context,
        query_ids,
        options={**options, "max_new_tokens": guard.rows},
        record_weights=True,
        stopping=lambda _: stopping,
    )
    spread = attention_spread((decoded.weights(0) or [])[:-2])
    if spread <= guard.spread:
        return None
    reason = (
        f"attention is spread over several passages ({spread:.2f}, above the limit of "
        f"{guard.spread:.2f})"
    )
    return Fallback("multi-hop", spread, float(guard.spread), True, reason)


def attention_spread(weights: Sequence[float]) -> float:
    """How far attention is spread over the passages: 1 minus the sum of their squared shares.

    An answer that stands in one passage reads mostly that one, however many others there are; one
    that is put together from several reads each of them in turn. Squares keep the little that many
    passages get from counting much (E. H. Simpson's diversity, Nature 1949).

    Returns:
        0 (one passage got all) up to 1 (evenly over very many); 0 where there is no attention.
    """
    whole = sum(weights)
    if whole <= 0:
        return 0.0
    return max(0.0, 1.0 - sum((weight / whole) ** 2 for weight in weights))
