"""Questions over nodes, retrievers that return them, and the engine's record of what was read."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import Chunk, Generation, Passage, WindowedLM
from training.tasks import draw_case

N = 16
BARE = PromptTemplate("{context_str}\n{query_str}")
"""The embedded reader was taught to answer the bare question behind its passages."""


@dataclass(frozen=True)
class Asked:
    """A question whose answer one of the nodes states, the one at ``place``."""

    nodes: list[NodeWithScore]
    question: str
    answer: str
    place: int

    @property
    def passages(self) -> list[Passage]:
        return [
            Passage(node.text, id=node.node_id, title=node.metadata.get("title"), score=node.score)
            for node in self.nodes
        ]


class RecordingScheduler:
    """A scheduler whose every generation is kept."""

    def __init__(self, scheduler: Any, keep: Callable[[Generation], object]) -> None:
        self._scheduler, self._keep = scheduler, keep

    def answer(self, request: Any, **options: Any) -> Generation:
        generation: Generation = self._scheduler.answer(request, **options)
        self._keep(generation)
        return generation

    def submit(self, request: Any, **options: Any) -> Any:
        def ended(future: Any) -> None:
            if not future.cancelled() and future.exception() is None:
                self._keep(future.result())

        scheduled = self._scheduler.submit(request, **options)
        scheduled.add_done_callback(ended)
        return scheduled


class RecordingLM(WindowedLM):
    """Keeps every generation: the engine's own record of windows, spans and provenance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generations: list[Generation] = []
        self._lock = threading.Lock()

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        return self._note(super().generate(*args, **kwargs))

    def shared_scheduler(self, *, max_rows: int = 32) -> Any:
        return RecordingScheduler(super().shared_scheduler(max_rows=max_rows), self._note)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Chunk]:
        chunks = super().stream(*args, **kwargs)

        def noting() -> Iterator[Chunk]:
            for chunk in chunks:
                if chunk.generation is not None:
                    self._note(chunk.generation)
                yield chunk

        return noting()

    def _note(self, generation: Generation) -> Generation:
        with self._lock:
            self.generations.append(generation)
        return generation


class ListRetriever(BaseRetriever):
    """Returns always the same nodes."""

    def __init__(self, nodes: Sequence[NodeWithScore]) -> None:
        super().__init__()
        self.nodes = list(nodes)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self.nodes)


def draw(seed: int, place: int, n: int = N) -> Asked:
    """A question over ``n`` passages; the one that answers it stands at ``place``."""
    case = draw_case(np.random.default_rng(seed), "single", n)
    (message,) = case.messages
    question = message["content"]
    right = next(i for i, (title, _) in enumerate(case.passages) if title and title in question)
    texts = list(case.passages)
    texts[right], texts[place] = texts[place], texts[right]
    nodes = [
        NodeWithScore(
            node=TextNode(text=text, id_=f"node-{i}", metadata={"title": title or ""}),
            score=1.0 - i / 100,
        )
        for i, (title, text) in enumerate(texts)
    ]
    return Asked(nodes, question, case.answer, place)


@functools.cache
def reader() -> RecordingLM:
    """The embedded reader, loaded once for all tests."""
    return RecordingLM.from_pretrained("tiny-reader")


@functools.cache
def one_for_each_place(n: int = N) -> tuple[Asked, ...]:
    """``n`` questions that the reader answers right, the fact once at every place.

    The reader is no oracle; what it gets wrong when asked directly says nothing of an adapter. So
    it is asked directly first, over the texts as each route words them.
    """
    found: list[Asked] = []
    for seed in range(4 * n):
        asked = draw(7000 + seed, len(found), n)
        if all(
            reader().generate(asked.question, worded, max_new_tokens=16).text == asked.answer
            for worded in _wordings(asked.passages)
        ):
            found.append(asked)
        if len(found) == n:
            return tuple(found)
    raise RuntimeError(f"The embedded reader answered only {len(found)} of {4 * n} questions.")


def _wordings(passages: list[Passage]) -> Iterator[list[Passage]]:
    yield passages
    # LlamaIndex's own wording of a node with its metadata, and CitationQueryEngine's.
    yield [Passage(f"title: {one.title}\n\n{one.text}") for one in passages]
    yield [
        dataclasses.replace(one, text=f"Source {i}:\n{one.text}\n")
        for i, one in enumerate(passages, 1)
    ]


@contextmanager
def recorded() -> Iterator[list[Generation]]:
    """The generations of the block, as the engine gave them."""
    reader().generations.clear()
    yield reader().generations


def read_apart(generation: Generation, texts: Sequence[str]) -> bool:
    """Whether the engine's record shows each text, whole, in a window of its own, in order."""
    spans = [(w.passage, w.part, w.parts, w.start, w.end) for w in generation.windows]
    words = [decoded(generation, i) for i in range(len(generation.windows))]
    return spans == [(i, 0, 1, 0, len(text)) for i, text in enumerate(texts)] and all(
        text.split() == word[-len(text.split()) :] for text, word in zip(texts, words, strict=True)
    )


def decoded(generation: Generation, window: int) -> list[str]:
    """The words that a window's tokens spell."""
    tokenizer = reader().tokenizer
    if tokenizer is None:
        raise RuntimeError("The embedded reader has a tokenizer.")
    return str(tokenizer.decode(generation.windows[window].ids)).split()


@functools.cache
def llm() -> RagWindowsLLM:
    """The embedded reader as LlamaIndex's LLM."""
    return RagWindowsLLM(lm=reader(), max_new_tokens=16)
