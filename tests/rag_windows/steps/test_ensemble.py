"""What is prepared for an answer in rows is prepared once, not once a token."""

from __future__ import annotations

from typing import Any

import pytest

from rag_windows import Passage
from rag_windows.attention import backends
from tests.rag_windows import small


@pytest.mark.parametrize("method", ["pced", "ensemble", "pcw"])
def test_a_further_token_prepares_no_window_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    calls_for = backends.calls_for

    def counted(requests: Any, *given: Any, **options: Any) -> Any:
        asked.append(len(requests))
        return calls_for(requests, *given, **options)

    monkeypatch.setattr("rag_windows.attention.segments.calls_for", counted)
    lm = small.lm()
    passages = [Passage(f"passage {number}") for number in range(6)]

    def requests(tokens: int) -> int:
        asked.clear()
        lm.generate("a b", passages, method=method, max_new_tokens=tokens, min_new_tokens=tokens)
        return sum(asked)

    first, layers = requests(2), lm.model.config.num_hidden_layers
    # The query's own keys are new with each token; windows are what they were.
    assert requests(7) - first == 5 * layers
