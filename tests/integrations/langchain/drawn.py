"""Questions over documents that the embedded reader answers, and the engine's own record."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from rag_windows import Chunk, Generation, WindowedLM
from rag_windows.batching.questions import Ticket
from rag_windows.batching.scheduler import Lone, Scheduler
from training.tasks import draw_case

N = 16


@dataclass(frozen=True)
class Drawn:
    """A question whose answer one of the documents states."""

    documents: list[Document]
    question: str
    answer: str


class RecordingScheduler(Scheduler):
    """Keeps every generation on its model."""

    generations: list[Generation]

    def _resolve(self, ticket: Ticket, result: Generation | BaseException) -> None:
        if isinstance(result, Generation):
            self.generations.append(result)
        super()._resolve(ticket, result)

    def answer(self, request: Any, *, lone: Lone | None = None) -> Generation:
        generations = self.generations
        generation = super().answer(request, lone=lone)
        if not any(one is generation for one in generations):  # by the caller's own thread
            generations.append(generation)
        return generation


class RecordingLM(WindowedLM):
    """Keeps every generation, and with it the record of the windows that were read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generations: list[Generation] = []

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        generation = super().generate(*args, **kwargs)
        self.generations.append(generation)
        return generation

    def scheduler(self, *, max_rows: int = 32) -> Scheduler:
        made = RecordingScheduler(self.engine, max_rows=max_rows)
        made.generations = self.generations
        return made

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Chunk]:
        chunks = super().stream(*args, **kwargs)

        def noting() -> Iterator[Chunk]:
            for chunk in chunks:
                if chunk.generation is not None:
                    self.generations.append(chunk.generation)
                yield chunk

        return noting()


class ListRetriever(BaseRetriever):
    """Returns always the same documents, and notes what it was asked."""

    documents: list[Document]
    asked: list[str]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        self.asked.append(query)
        return list(self.documents)


def retriever(drawn: Drawn) -> ListRetriever:
    return ListRetriever(documents=drawn.documents, asked=[])


def draw(seed: int, place: int, n: int = N) -> Drawn | None:
    """A question over ``n`` documents; the one that answers it stands at ``place``.

    None where no title tells which document that is.
    """
    case = draw_case(np.random.default_rng(seed), "single", n)
    question = case.messages[-1]["content"]
    texts = list(case.passages)
    right = next((i for i, (title, _) in enumerate(texts) if title and title in question), None)
    if right is None:
        return None
    texts[right], texts[place] = texts[place], texts[right]
    documents = [
        Document(page_content=text, id=f"doc-{i}", metadata={"title": title, "row": i})
        for i, (title, text) in enumerate(texts)
    ]
    return Drawn(documents, question, case.answer)


@functools.cache
def reader() -> RecordingLM:
    """The embedded reader, loaded once for all tests."""
    return RecordingLM.from_pretrained("tiny-reader")


@functools.cache
def answered(place: int, n: int = N) -> Drawn:
    """A question with its fact at this place that the reader, asked directly, answers right.

    The reader is no oracle: what it gets wrong by itself says nothing of an adapter.
    """
    for seed in range(4000 + 50 * place, 4050 + 50 * place):
        drawn = draw(seed, place, n)
        if drawn is None:
            continue
        passages = [{"text": d.page_content, "title": d.metadata["title"]} for d in drawn.documents]
        if reader().generate(drawn.question, passages, max_new_tokens=16).text == drawn.answer:
            return drawn
    raise RuntimeError(f"The embedded reader answered none of 50 questions at place {place}.")


def one_window_each(generation: Generation, texts: Sequence[str]) -> bool:
    """Whether the record shows each whole text in a window of its own, in order."""
    spans = [(w.passage, w.part, w.parts, w.start, w.end) for w in generation.windows]
    return spans == [(i, 0, 1, 0, len(text)) for i, text in enumerate(texts)]


def texts_of(documents: Sequence[Document]) -> list[str]:
    return [document.page_content for document in documents]
