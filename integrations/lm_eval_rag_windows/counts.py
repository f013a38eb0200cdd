"""What became of the requests of a run, for the harness's results file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rag_windows.prefill import EncodedContext


@dataclass(slots=True)
class Counts:
    """Counts over all requests so far; those without any prompt, as for perplexity, are left out.

    Attributes:
        windows: how many requests had so many windows.
        contexts: different sets of prefix and windows.
        encoded: windows that were computed.
        reused: windows that were found in the passage cache.
    """

    windows: Counter[int] = field(default_factory=Counter)
    contexts: int = 0
    encoded: int = 0
    reused: int = 0

    def add(self, context: EncodedContext, windows: int, requests: int) -> None:
        """Requests that read one context together."""
        self.windows[windows] += requests
        self.contexts += 1
        self.encoded += context.encoded_windows
        self.reused += context.cached_windows

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "requests_by_windows": {str(n): count for n, count in sorted(self.windows.items())},
            "contexts": self.contexts,
            "windows_encoded": self.encoded,
            "windows_reused": self.reused,
        }
