"""Asking vLLM's offline engine over documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rag_windows.errors import GenerationError
from vllm_rag_windows.prompts import (
    Document,
    Query,
    SentWindows,
    WindowedPrompt,
    WindowPrompts,
    failed,
    vllm_request,
)


class OfflineWindows:
    """A `vllm.LLM` with the connector, which reads each document in a window of its own.

    Args:
        llm: made with ``kv_transfer_config``.
        options: of `WindowPrompts`.
    """

    def __init__(self, llm: Any, **options: Any) -> None:
        self._llm = llm
        self._prompts = WindowPrompts(llm.get_tokenizer(), **options)
        self._encoded = SentWindows()

    def generate(
        self, questions: Iterable[tuple[Query, Iterable[Document]]], sampling: Any = None
    ) -> list[Any]:
        """Answer questions, each over its documents, together.

        Returns:
            vLLM's `RequestOutput` of each question, in order.

        Raises:
            InputError: a question or a document can't be used.
            GenerationError: vLLM ended a request with an error; its log says why.
        """
        sampling = sampling or self._llm.get_default_sampling_params()
        asked = [self._prompts.build(query, documents) for query, documents in questions]
        answers: list[Any] = [None] * len(asked)
        for _ in range(2):  # what was encoded before may have been evicted
            left = [number for number, answer in enumerate(answers) if answer is None]
            prompts = [asked[number] for number in left]
            encodings = self._encoded.missing(prompts)
            for one, output in zip(encodings, self._run(encodings), strict=True):
                if not failed(output):
                    self._encoded.note(one)
            for number, output in zip(left, self._run(prompts, sampling), strict=True):
                if failed(output):
                    self._encoded.forget(asked[number])
                else:
                    answers[number] = output
            if None not in answers:
                return answers
        raise GenerationError(
            f"In vLLM {answers.count(None)} of {len(asked)} questions ended with an error. "
            "The log of vLLM says why. Where it names missing windows, raise 'recent' until the "
            "entries of one question fit in."
        )

    def _run(self, prompts: Sequence[WindowedPrompt], sampling: Any = None) -> list[Any]:
        asked = [vllm_request(prompt, sampling) for prompt in prompts]
        ids, params = [one for one, _ in asked], [one for _, one in asked]
        return list(self._llm.generate(ids, params, use_tqdm=False)) if asked else []
