"""A conversation in which every turn retrieves anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from rag_windows.cli.ask import NO_HITS, AnswerOptions, reply
from rag_windows.cli.corpus import Corpus, SearchOptions, open_corpus
from rag_windows.cli.engine import ModelOptions, closing_cache, load_model
from rag_windows.cli.errors import tell
from rag_windows.cli.progress import Progress
from rag_windows.errors import RagWindowsError
from rag_windows.prompt.conversation import Dialogue
from rag_windows.prompt.visible_text import encodable

if TYPE_CHECKING:
    from rag_windows.model import WindowedLM

_PROMPT = "> "
_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves."


def chat(search: SearchOptions, answering: AnswerOptions, model: ModelOptions) -> None:
    """Answer line after line of standard input until /exit or its end.

    On a terminal, Ctrl-C stops an answer and an error ends only its turn; with input from a file or
    a pipe both end the conversation.

    Raises:
        RagWindowsError: see `rag_windows.cli.ask.ask`.
    """
    progress = Progress()
    corpus = open_corpus(search, progress)
    lm = load_model(model, progress)
    # A process may be started without any standard input.
    interactive = sys.stdin is not None and sys.stdin.isatty()
    for note in corpus.notes:
        tell(f"Note: {note}")
    if interactive:
        tell(f"{len(corpus.retriever.passages)} passages, {model.model}. {_HELP}")
    with closing_cache(lm):
        _converse(lm, corpus, search, answering, model, progress, interactive=interactive)


def _converse(
    lm: WindowedLM,
    corpus: Corpus,
    search: SearchOptions,
    answering: AnswerOptions,
    model: ModelOptions,
    progress: Progress,
    *,
    interactive: bool,
) -> None:
    dialogue = Dialogue()
    for question in _questions(interactive, answering.as_json):
        if question in ("/clear", "/help"):
            if question == "/clear":
                dialogue = Dialogue()
            tell(_HELP if question == "/help" else "The conversation is forgotten.")
            continue
        found = corpus.retriever.retrieve(dialogue.search_text(question), search.top_k)
        notes = () if found else (NO_HITS,)
        heard: list[str] = []
        query = dialogue.with_question(question)
        try:
            answer = reply(
                lm, query, found, answering, model.model, progress, notes, heard.append
            ).text
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
        if not answering.as_json:
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
