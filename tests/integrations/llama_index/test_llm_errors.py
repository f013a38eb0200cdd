"""Bad input reaches the caller through LlamaIndex's synthesizers, and is no "Empty Response"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    CompactAndRefine,
    Refine,
    TreeSummarize,
)

from llama_index.llms.rag_windows import (
    Parts,
    RagWindowsLLM,
    WindowPromptHelper,
    WindowSynthesizer,
)
from rag_windows import InputError, LimitError, RagWindowsError
from tests.integrations.llama_index.cases import reader

WRONG: dict[str, tuple[Callable[[], RagWindowsLLM], type[RagWindowsError]]] = {
    "an option of the wrong type": (
        lambda: RagWindowsLLM(lm=reader(), generate_kwargs={"num_beams": "two"}),
        InputError,
    ),
    "more tokens than positions": (
        lambda: RagWindowsLLM(lm=reader(), max_new_tokens=10**6, context_window=10**8),
        LimitError,
    ),
}
SYNTHESIZERS: dict[str, Callable[..., BaseSynthesizer]] = {
    **{kind.__name__: kind for kind in (Refine, CompactAndRefine, TreeSummarize)},
    "WindowSynthesizer": lambda llm, streaming, **_: WindowSynthesizer(llm, streaming=streaming),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("synthesizer", SYNTHESIZERS)
@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_surfaces(wrong: str, synthesizer: str, streaming: bool) -> None:
    make, error = WRONG[wrong]
    options: dict[str, Any] = {"prompt_helper": WindowPromptHelper(), "streaming": streaming}
    asked = SYNTHESIZERS[synthesizer](llm=make(), **options)

    async def awaited() -> None:
        response: Any = await asked.aget_response("Who?", [Parts.of(["A passage."])])
        if streaming:
            async for _ in response:
                pass

    with pytest.raises(error):
        list(cast(Any, asked.get_response("Who?", [Parts.of(["A passage."])])))
    with pytest.raises(error):
        asyncio.run(awaited())
