"""Many questions for a small model."""

from __future__ import annotations

from typing import Any

from langchain_rag_windows import ChatRagWindows
from tests.integrations.shared_steps import TOKENS, documents
from tests.rag_windows import small

N = 32


def model(kind: type[Any] = ChatRagWindows, **options: Any) -> Any:
    forced = {"min_new_tokens": TOKENS, **options.pop("generate_kwargs", {})}
    made = {"lm": small.lm(), "max_tokens": TOKENS, "generate_kwargs": forced, **options}
    return kind(**made)


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.text)


def questions() -> list[str]:
    return [f"Question {i}?" for i in range(N)]


_ALONE: dict[tuple[type[Any], bool], list[str]] = {}


def alone(kind: type[Any] = ChatRagWindows, *, same: bool = False) -> list[str]:
    """What each question is answered by itself, over documents of its own or those of the first.

    Asked once for all tests.
    """
    if (kind, same) not in _ALONE:
        llm = model(kind)
        _ALONE[kind, same] = [
            text_of(llm.invoke(question, documents=documents(0 if same else i)))
            for i, question in enumerate(questions())
        ]
    return _ALONE[kind, same]
