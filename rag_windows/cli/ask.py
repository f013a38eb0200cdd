"""One question, one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rag_windows.cli import render
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.engine import ModelOptions, closing_cache, load_model
from rag_windows.cli.errors import tell
from rag_windows.cli.progress import Progress
from rag_windows.errors import GenerationError, InputError
from rag_windows.passage import Passage
from rag_windows.prompt.visible_text import encodable, visible

if TYPE_CHECKING:
    from rag_windows.model import WindowedLM
    from rag_windows.results import Generation

NO_HITS = "No passage shares a word with the question, so the model answered without any."


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is written and shown."""

    system: str | None = None
    max_new_tokens: int = 128
    temperature: float | None = None
    seed: int | None = None
    as_json: bool = False
    link_tokens: Any = None
    fallback: Literal["sequential"] | None = None

    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `WindowedLM.generate`."""
        options: dict[str, Any] = {
            "prefix": None if self.system is None else encodable(self.system),
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "link_tokens": self.link_tokens,
            "fallback": self.fallback,
        }
        from rag_windows.generate import sampling_options  # with the model, torch is loaded already

        return options | sampling_options(self.temperature)


def ask(
    question: str, search: SearchOptions, answering: AnswerOptions, model: ModelOptions
) -> None:
    """Answer one question over the documents and show where the answer looked.

    Raises:
        RagWindowsError: see `open_corpus`, `load_model` and `WindowedLM.generate`.
    """
    question = encodable(question)
    if not question.strip():
        raise InputError("The question is empty; write one, in quotes.")
    _check_not_a_file(question)
    progress = Progress()
    corpus = open_corpus(search, progress)
    passages = corpus.retriever.retrieve(question, search.top_k)
    lm = load_model(model, progress)
    # Notes wait for the answer: where there is none, the error alone is told.
    notes = corpus.notes if passages else (*corpus.notes, NO_HITS)
    with closing_cache(lm):
        reply(lm, question, passages, answering, model.model, progress, notes)


def _check_not_a_file(question: str) -> None:
    """A path that lost its --docs must not be answered as a question."""
    from rag_windows_retrievers import SUFFIXES

    if question.split() != [question]:
        return
    if Path(question).suffix.lower() in SUFFIXES or ("/" in question and Path(question).exists()):
        raise InputError(
            f"The question {question!r} is the name of a file; give each file a --docs of its own, "
            "and the question in quotes."
        )


def reply(
    lm: WindowedLM,
    query: str | Sequence[Mapping[str, str]],
    passages: Sequence[Passage],
    answering: AnswerOptions,
    model: str,
    progress: Progress,
    notes: Sequence[str] = (),
    heard: Callable[[str], None] | None = None,
) -> Generation:
    """Generate and show one answer, as text with its sources or as one JSON object.

    Args:
        lm: the model.
        query: a question or a conversation.
        passages: best first.
        answering: options.
        model: the model's name, to be shown.
        progress: shows what goes on before the first word.
        notes: what to tell besides what the generation tells.
        heard: called with each piece of text as it is shown.
    """
    from rag_windows.methods import linked  # with the model, torch is loaded already

    options = answering.generate_kwargs()
    method = linked(lm.method, answering.link_tokens).name
    if answering.as_json:
        with progress.counting("Encoding the passages") as on_encoded:
            generation = lm.generate(query, passages, on_encoded=on_encoded, **options)
        render.write_json(render.answer_object(generation, passages, method, model))
        for note in (*notes, *render.notes(generation, passages, answering.max_new_tokens)):
            tell(f"Note: {note}")
        return generation
    generation = _stream(lm, query, passages, options, progress, heard)
    out = render.console()
    out.print("\n")
    render.show_passages(out, generation, passages)
    for note in (*notes, *render.notes(generation, passages, answering.max_new_tokens)):
        out.print(f"Note: {visible(note)}", style="yellow", soft_wrap=True)
    render.show_figures(out, generation, model, method)
    return generation


def _stream(
    lm: WindowedLM,
    query: str | Sequence[Mapping[str, str]],
    passages: Sequence[Passage],
    options: Mapping[str, Any],
    progress: Progress,
    heard: Callable[[str], None] | None,
) -> Generation:
    generation = None
    with ExitStack() as stack:
        waiting = stack.enter_context(ExitStack())
        doing = "Encoding the passages" if passages else "Answering"
        on_encoded = waiting.enter_context(progress.counting(doing))
        stream = lm.stream(query, passages, on_encoded=on_encoded, **options)
        # A stream that is closed stops its work, also on Ctrl-C.
        chunks = stack.enter_context(closing(stream))  # type: ignore[type-var] # has close()
        for chunk in chunks:
            if chunk.text or chunk.generation:
                waiting.close()
            render.write_piece(chunk.text)
            if heard:
                heard(chunk.text)
            generation = chunk.generation or generation
    if generation is None:
        raise GenerationError("The stream ended without a result; please report this.")
    return generation
