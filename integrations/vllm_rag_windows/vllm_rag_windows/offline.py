"""Asking vLLM's offline engine over documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rag_windows.errors import GenerationError
from vllm_rag_windows.prompts import Document, Encoded, TokenRequest, WindowPrompts
from vllm_rag_windows.windowed_prompt import new_cache_salt

Query = str | Sequence[Mapping[str, Any]]


def engine_prompt(request: TokenRequest) -> dict[str, Any]:
    """A request's token ids as vLLM takes them."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.ids)}
    if request.params is not None and "windows" in request.params:
        prompt["cache_salt"] = new_cache_salt()
    return prompt


def sampling_of(request: TokenRequest, sampling: Any) -> Any:
    """A copy of vLLM's `SamplingParams` with what a request says of its windows."""
    if request.params is None:
        return sampling
    made = sampling.clone()
    made.extra_args = {**(made.extra_args or {}), "kv_transfer_params": dict(request.params)}
    return made


def failed(outputs: Any) -> bool:
    """Whether a request ended with an error."""
    return any(one.finish_reason == "error" for one in outputs.outputs)


class OfflineWindows:
    """A `vllm.LLM` with the connector, which reads each document in a window of its own.

    Args:
        llm: made with ``kv_transfer_config``.
        options: of `WindowPrompts`.
    """

    def __init__(self, llm: Any, **options: Any) -> None:
        self._llm = llm
        self._prompts = WindowPrompts(llm.get_tokenizer(), **options)
        self._encoded = Encoded()

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
        answers: dict[int, Any] = {}
        for again in (False, True):
            left = [number for number in range(len(asked)) if number not in answers]
            needed = [one for number in left for one in asked[number].encode]
            if todo := self._encoded.missing(needed, again=again):
                self._encode(todo)
            outputs = self._run([asked[number].read for number in left], sampling)
            found = zip(left, outputs, strict=True)
            answers |= {number: one for number, one in found if not failed(one)}
            if len(answers) == len(asked):
                return [answers[number] for number in range(len(asked))]
        raise GenerationError(
            f"In vLLM {len(asked) - len(answers)} of {len(asked)} questions ended with an error. "
            "The log of vLLM says why. Where it names missing windows, raise 'recent' until the "
            "entries of one question fit in."
        )

    def _encode(self, requests: Sequence[TokenRequest]) -> None:
        sampling = self._llm.get_default_sampling_params()
        sampling.max_tokens, sampling.temperature = 1, 0.0
        outputs = self._run(requests, sampling)
        pairs = zip(requests, outputs, strict=True)
        self._encoded.note(request for request, output in pairs if not failed(output))

    def _run(self, requests: Sequence[TokenRequest], sampling: Any) -> list[Any]:
        prompts = [engine_prompt(one) for one in requests]
        params = [sampling_of(one, sampling) for one in requests]
        return list(self._llm.generate(prompts, params, use_tqdm=False))
