"""The commands `ask` and `chat`: questions over documents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_windows.cli import options, render
from rag_windows.cli.corpus import Corpus, SearchOptions, open_corpus
from rag_windows.cli.errors import tell
from rag_windows.cli.models import ModelOptions, closing_cache, load_model
from rag_windows.cli.progress import Progress
from rag_windows.errors import GenerationError, InputError, RagWindowsError
from rag_windows.passage import Passage
from rag_windows.prompt.visible_text import encodable

if TYPE_CHECKING:
    from rag_windows import Generation, WindowedLM

_NO_HITS = "No passage shares a word with the question, so the model answered without any."
_PROMPT = "> "
_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves."

Query = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is written and shown; each field is the option of its name."""

    system: options.System = None
    max_new_tokens: options.MaxNewTokens = 128
    temperature: options.Temperature = None
    seed: options.Seed = None
    link_tokens: options.LinkTokens = None
    fallback: options.Fallback = None
    json: options.Json = False


@options.spreading()
def ask(
    *,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="What you want to know, in quotes.")
    ],
    search: SearchOptions,
    model: ModelOptions,
    answer: AnswerOptions,
) -> None:
    """Answer one question over documents and show which passages the answer looked at."""
    search.check_reader(model.model)
    question = encodable(question)
    if not question.strip():
        raise InputError("The question is empty; write one, in quotes.")
    _check_not_a_file(question)
    progress = Progress()
    corpus = open_corpus(search, progress)
    passages = corpus.retriever.retrieve(question, search.top_k)
    lm = load_model(model, progress)
    # Notes wait for the answer: where there is none, the error alone is told.
    notes = corpus.notes if passages else (*corpus.notes, _NO_HITS)
    with closing_cache(lm):
        _Replies(lm, model.name, answer, progress).reply(question, passages, notes)


@options.spreading()
def chat(*, search: SearchOptions, model: ModelOptions, answer: AnswerOptions) -> None:
    """The same as a conversation: one question a line, follow-ups welcome, /exit leaves."""
    search.check_reader(model.model)
    progress = Progress()
    corpus = open_corpus(search, progress)
    lm = load_model(model, progress)
    # A process may be started without any standard input.
    interactive = sys.stdin is not None and sys.stdin.isatty()
    for note in corpus.notes:
        tell(f"Note: {note}")
    if interactive:
        tell(f"{len(corpus.retriever.passages)} passages, {model.name}. {_HELP}")
    with closing_cache(lm):
        replies = _Replies(lm, model.name, answer, progress)
        _converse(replies, corpus, search.top_k, interactive=interactive)


@dataclass(frozen=True, slots=True)
class _Replies:
    """Generates and shows answers, as text with its sources or as one JSON object each."""

    lm: WindowedLM
    name: str
    options: AnswerOptions
    progress: Progress

    def reply(
        self,
        query: Query,
        passages: Sequence[Passage],
        notes: Sequence[str] = (),
        heard: Callable[[str], None] | None = None,
    ) -> Generation:
        """Answer a question or a conversation.

        Args:
            query: the question or conversation.
            passages: best first.
            notes: what to tell besides what the generation tells.
            heard: called with each piece of text as it is shown.
        """
        from rag_windows.methods import linked
        from rag_windows.sampling import sampling_options

        told = self.options
        settings = {
            "prefix": None if told.system is None else encodable(told.system),
            "max_new_tokens": told.max_new_tokens,
            "seed": told.seed,
            "link_tokens": told.link_tokens,
            "fallback": told.fallback,
            **sampling_options(told.temperature),
        }
        method = linked(self.lm.method, told.link_tokens).name
        if told.json:
            with self.progress.counting("Encoding the passages") as on_encoded:
                generation = self.lm.generate(query, passages, on_encoded=on_encoded, **settings)
            render.write_json(render.answer_object(generation, passages, method, self.name))
        else:
            generation = self._stream(query, passages, settings, heard)
            out = render.console()
            out.print("\n")
            render.show_passages(out, generation, passages)
        notes = [*notes, *render.notes(generation, passages, told.max_new_tokens)]
        render.write_notes(notes, as_json=told.json)
        if not told.json:
            render.show_figures(generation, self.name, method)
        return generation

    def _stream(
        self,
        query: Query,
        passages: Sequence[Passage],
        settings: Mapping[str, Any],
        heard: Callable[[str], None] | None,
    ) -> Generation:
        generation = None
        with ExitStack() as stack:
            waiting = stack.enter_context(ExitStack())
            doing = "Encoding the passages" if passages else "Answering"
            on_encoded = waiting.enter_context(self.progress.counting(doing))
            stream = self.lm.stream(query, passages, on_encoded=on_encoded, **settings)
            # A stream that is closed stops its work, also on Ctrl-C.
            for chunk in stack.enter_context(closing(stream)):  # type: ignore[type-var] # has close()
                if chunk.text or chunk.generation:
                    waiting.close()
                render.write_piece(chunk.text)
                if heard:
                    heard(chunk.text)
                generation = chunk.generation or generation
        if generation is None:
            raise GenerationError("The stream ended without a result; please report this.")
        return generation


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


def _converse(replies: _Replies, corpus: Corpus, top_k: int, *, interactive: bool) -> None:
    """Answer line after line of standard input until /exit or its end.

    On a terminal, Ctrl-C stops an answer and an error ends only its turn; with input from a file or
    a pipe both end the conversation.
    """
    from rag_windows.prompt.conversation import Dialogue

    dialogue = Dialogue()
    as_json = replies.options.json
    for question in _questions(interactive, as_json):
        if question in ("/clear", "/help"):
            if question == "/clear":
                dialogue = Dialogue()
            tell(_HELP if question == "/help" else "The conversation is forgotten.")
            continue
        found = corpus.retriever.retrieve(dialogue.search_text(question), top_k)
        notes = () if found else (_NO_HITS,)
        heard: list[str] = []
        query = dialogue.with_question(question)
        try:
            answer = replies.reply(query, found, notes, heard.append).text
        except KeyboardInterrupt:
            if heard:
                print()
            if not interactive:
                raise
            answer = "".join(heard)
            tell("Stopped.")
        except RagWindowsError as error:
            if not interactive:
                raise
            tell(f"Error: {error} {_HELP}")
            continue
        if not as_json:
            print()
        dialogue.add(question, answer)


def _questions(interactive: bool, as_json: bool) -> Iterator[str]:
    """Lines of standard input that are not blank, up to /exit."""
    lines = _typed(as_json) if interactive else sys.stdin or ()
    for line in lines:
        question = encodable(line).strip()
        if question == "/exit":
            return
        if question:
            yield question


def _typed(as_json: bool) -> Iterator[str]:
    # input() edits lines with readline only when both ends are terminals; its prompt would
    # otherwise land in the output.
    edited = sys.stdout.isatty() and not as_json
    if edited:
        with suppress(ModuleNotFoundError):  # Windows has none
            import readline  # noqa: F401 - importing it is what makes input() edit lines
    while True:
        if edited:
            try:
                line = input(_PROMPT)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                raise
            yield line
        else:
            print(_PROMPT, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return
            yield line
