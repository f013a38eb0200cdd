"""What the server reports to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rag_windows import PassageCache, RagWindowsError
from rag_windows_server.keys import Tenant

if TYPE_CHECKING:
    from rag_windows_server.answering import ServedAnswer
    from rag_windows_server.collection import Collection

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Metrics:
    """Counters of one server, in a registry of its own.

    Attributes:
        registry: what ``GET /metrics`` writes.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"registry": self.registry}
        self._requests = Counter(
            "rag_windows_requests", "Requests by route and status.", ["route", "status"], **own
        )
        self._answers = Counter(
            "rag_windows_answers",
            "Answers by tenant and outcome: stop, length, tool_calls, error, cancelled.",
            ["tenant", "outcome"],
            **own,
        )
        self._tokens = Counter(
            "rag_windows_tokens",
            "Tokens by tenant and kind: prompt, cached (those of the prompt that were not "
            "computed), completion.",
            ["tenant", "kind"],
            **own,
        )
        self._first = Histogram(
            "rag_windows_time_to_first_token_seconds",
            "From a turn in line to the first token.",
            buckets=_SECONDS,
            **own,
        )
        self._whole = Histogram(
            "rag_windows_answer_seconds",
            "From a turn in line to the end of the answer.",
            buckets=_SECONDS,
            **own,
        )
        self._rate = Histogram(
            "rag_windows_tokens_per_second",
            "Tokens a second of one answer, behind its first.",
            buckets=_RATES,
            **own,
        )
        self._rows = Gauge("rag_windows_batch_rows", "Answers that are being written.", **own)
        self._waiting = Gauge("rag_windows_queue_requests", "Requests that wait in line.", **own)

        self._held = {
            name: Gauge(f"rag_windows_{name}", f"{text}; 0 without an index.", **own)
            for name, text in (
                ("documents", "The server's own documents"),
                ("passages", "Passages of the server's own documents"),
            )
        }

    def hold(self, collection: Collection) -> None:
        """Take the numbers of documents and passages from here."""

        def counted(name: str) -> Callable[[], float]:
            def number() -> float:
                with suppress(RagWindowsError):  # the other counters are reported all the same
                    return float(getattr(collection.index.counts(), name))
                return float("nan")

            return number

        for name in ("documents", "passages"):
            self._held[name].set_function(counted(name))

    def watch(self, waiting: Callable[[], int]) -> None:
        """Take the length of the line from this function."""
        self._waiting.set_function(waiting)

    def request(self, route: str, status: int) -> None:
        """A request has ended."""
        self._requests.labels(route, str(status)).inc()

    @contextmanager
    def answering(self, tenant: Tenant, rows: int) -> Generator[Outcome]:
        """Count answers while they are written; the caller sets their outcome."""
        outcome = Outcome()
        failure = "cancelled"
        self._rows.inc(rows)
        try:
            yield outcome
            failure = "error"
        except Exception:
            failure = "error"
            raise
        finally:
            self._rows.dec(rows)
            if not outcome.answers:
                self._answers.labels(tenant.name, failure).inc(rows)
            self._count(tenant, outcome)

    def _count(self, tenant: Tenant, outcome: Outcome) -> None:
        for one in outcome.answers:
            usage, timings = one.generation.usage, one.generation.timings
            self._answers.labels(tenant.name, one.finish_reason).inc()
            self._tokens.labels(tenant.name, "prompt").inc(usage.prompt_tokens)
            self._tokens.labels(tenant.name, "cached").inc(usage.cached_tokens)
            self._tokens.labels(tenant.name, "completion").inc(usage.completion_tokens)
            self._first.observe(timings.ttft_s)
            self._whole.observe(timings.total_s)
            seconds = timings.total_s - timings.ttft_s
            if usage.completion_tokens > 1 and seconds > 0:
                self._rate.observe((usage.completion_tokens - 1) / seconds)

    def text(self, cache: PassageCache | None) -> bytes:
        """All of it in Prometheus' text format, with the passage cache's counters."""
        own = generate_latest(self.registry)
        return own if cache is None else own + cache.metrics().encode()


class Outcome:
    """The answers to one request; empty until all of them are complete."""

    def __init__(self) -> None:
        self.answers: Sequence[ServedAnswer] = ()
