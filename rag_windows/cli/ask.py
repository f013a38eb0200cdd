"""The commands `ask` and `chat`: questions over documents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.bar import Bar
from rich.table import Column
from rich.text import Text

from rag_windows.cli import options
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.errors import tell
from rag_windows.cli.models import ModelOptions, loaded_model
from rag_windows.cli.options import option
from rag_windows.cli.render import console, plain_table, progress, show, show_notes, write_json
from rag_windows.errors import GenerationError, InputError, RagWindowsError
from rag_windows.passage import Passage
from rag_windows.prompt.visible_text import encodable, one_line, visible

if TYPE_CHECKING:
    from rag_windows import Generation, WindowedLM
    from rag_windows_retrievers import BM25Retriever

_NO_HITS = "No passage shares a word with the question, so the model answered without any."
_PROMPT = "> "
_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves."
_NAME, _BAR, _TEXTS_FROM, _BARS_FROM = 32, 16, 72, 36
"""Widths in characters: of names and bars, and of terminals that have room for texts and bars."""

Query = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is written and shown; each field is the option of its name."""

    system: options.System = None
    max_new_tokens: options.MaxNewTokens = 128
    temperature: Annotated[
        float | None,
        option("T", "Of sampling; 0 takes the likeliest. Default: the model's own.", min=0.0),
    ] = None
    seed: Annotated[int | None, option("N", "Makes sampling repeatable.")] = None
    link_tokens: options.LinkTokens = None
    fallback: Annotated[
        Literal["sequential"] | None,
        option(None, "Read passages one after the other where windows are likely to lose."),
    ] = None
    json: options.Json = False


@options.spreading()
def ask(
    *,
    question: Annotated[
        str,
        typer.Argument(
            metavar="QUESTION", help="What you want to know, in quotes.", parser=encodable
        ),
    ],
    search: SearchOptions,
    model: ModelOptions,
    answer: AnswerOptions,
) -> None:
    """Answer one question over documents and show which passages the answer looked at."""
    from rag_windows_retrievers import SUFFIXES

    if not question.strip():
        raise InputError("The question is empty; write one, in quotes.")
    path = Path(question)
    lone = question.split() == [question]
    if lone and (path.suffix.lower() in SUFFIXES or ("/" in question and path.exists())):
        raise InputError(
            f"The question {question!r} is the name of a file; give each file a --docs of its own, "
            "and the question in quotes."
        )
    retriever, notes = open_corpus(search, model.model)
    passages = retriever.retrieve(question, search.top_k)
    with loaded_model(model) as lm:
        # Notes wait for the answer: where there is none, the error alone is told.
        notes += [] if passages else [_NO_HITS]
        _Replies(lm, model.name, answer).reply(question, passages, notes)


@options.spreading()
def chat(*, search: SearchOptions, model: ModelOptions, answer: AnswerOptions) -> None:
    """The same as a conversation: one question a line, follow-ups welcome, /exit leaves."""
    retriever, notes = open_corpus(search, model.model)
    with loaded_model(model) as lm:
        # A process may be started without any standard input.
        interactive = sys.stdin is not None and sys.stdin.isatty()
        for note in notes:
            tell(f"Note: {note}")
        if interactive:
            tell(f"{len(retriever.passages)} passages, {model.name}. {_HELP}")
        replies = _Replies(lm, model.name, answer)
        _converse(replies, retriever, search.top_k, interactive=interactive)


@dataclass(frozen=True, slots=True)
class _Replies:
    """Generates and shows answers, as text with its sources or as one JSON object each."""

    lm: WindowedLM
    name: str
    options: AnswerOptions

    def reply(
        self,
        query: Query,
        passages: Sequence[Passage],
        notes: Sequence[str] = (),
        heard: Callable[[str], object] = str,
    ) -> Generation:
        """Answer a question or a conversation; `heard` is told each piece of text as it comes."""
        from rag_windows.methods import linked
        from rag_windows.sampling import sampling_options

        told = self.options
        settings = {
            "prefix": told.system,
            "max_new_tokens": told.max_new_tokens,
            "seed": told.seed,
            "link_tokens": told.link_tokens,
            "fallback": told.fallback,
            **sampling_options(told.temperature),
        }
        method = linked(self.lm.method, told.link_tokens).name
        with progress("Encoding the passages" if passages else "Answering") as on_encoded:
            stream = self.lm.stream(query, passages, on_encoded=on_encoded, **settings)
            begun = next(stream)
        generation = begun.generation
        # A stream that is closed stops its work, also on Ctrl-C.
        with closing(stream):  # type: ignore[type-var]  # has close()
            for chunk in chain([begun], stream):
                if not told.json:
                    sys.stdout.write(visible(chunk.text))
                    sys.stdout.flush()
                    heard(chunk.text)
                generation = chunk.generation
        if generation is None:
            raise GenerationError("The stream ended without a result; please report this.")
        if told.json:
            write_json(_answer_object(generation, passages, method, self.name))
        else:
            console().print("\n")
            _show_passages(generation, passages)
        notes = [*notes, *_notes(generation, passages, told.max_new_tokens)]
        show_notes(notes, as_json=told.json)
        if told.json:
            return generation
        usage, timings = generation.usage, generation.timings
        show(
            f"{self.name}, {method}: passages encoded in {timings.encode_s:.2f} s, first token "
            f"after {timings.ttft_s:.2f} s, all after {timings.total_s:.2f} s; "
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
            f"{usage.completion_tokens} generated.",
            "dim",
        )
        return generation


def _answer_object(
    generation: Generation, passages: Sequence[Passage], method: str, model: str
) -> dict[str, Any]:
    """What --json prints."""
    usage, weights = generation.usage, _weights(generation, passages)
    return {
        "answer": generation.text,
        "passages": [
            {"id": one.id, "title": one.title, "text": one.text, "score": one.score, "mass": weight}
            for one, weight in zip(passages, weights, strict=True)
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        },
        "timings": asdict(generation.timings),
        "method": method,
        "model": model,
        "fallback": None if generation.fallback is None else generation.fallback.as_dict(),
    }


def _weights(generation: Generation, passages: Sequence[Passage]) -> list[float | None]:
    found = {one.passage: one.mass for one in generation.citations or ()}
    return [found.get(index) for index in range(len(passages))]


def _show_passages(generation: Generation, passages: Sequence[Passage]) -> None:
    """Print the passages, each with its attention weight as a bar, and what got the rest."""
    if not passages:
        return
    out, weights = console(), _weights(generation, passages)
    longest = max((weight for weight in weights if weight is not None), default=0.0)
    # On a narrow terminal the texts go first, then the bars; weights are never cut.
    texts = out.width >= _TEXTS_FROM
    bars = out.width >= _BARS_FROM and out.encoding.lower().startswith("utf")
    bar = _BAR if texts else len("attention")
    room = out.width - len("00  ") - len("  00.0%") - (bar + 2) * bars
    widest = _NAME if texts else max(4, min(_NAME, room))
    columns = [Column(justify="right", no_wrap=True, style="dim"), Column("passage", no_wrap=True)]
    if texts:
        columns.append(Column("text", no_wrap=True, overflow="ellipsis", ratio=1, style="dim"))
    if bars:
        columns.append(Column("attention", width=bar, no_wrap=True, style="cyan"))
    columns.append(Column(justify="right", no_wrap=True, min_width=len("0.0%")))
    table = plain_table(*columns, expand=texts)
    for number, (passage, weight) in enumerate(zip(passages, weights, strict=True), start=1):
        style = "bold" if weight and weight == longest else ""
        name = one_line(passage.id or passage.title or "-")
        # Of a long path, the end tells most.
        name = name if len(name) <= widest else "…" + name[1 - widest :]
        cells: list[Any] = [str(number), Text(name, style)]
        if texts:
            title = f"{one_line(passage.title)}: " if passage.title else ""
            cells.append(Text(title + one_line(passage.text[:400])))
        if bars:
            cells.append(Bar(longest or 1.0, 0, weight or 0.0, width=bar, color="cyan"))
        table.add_row(*cells, Text("" if weight is None else f"{weight:.1%}", style))
    out.print(table)
    if generation.prefix_mass is not None and generation.query_mass is not None:
        show(
            f"The rest of the attention: prefix {generation.prefix_mass:.1%}, "
            f"question and answer {generation.query_mass:.1%}.",
            "dim",
        )


def _notes(generation: Generation, passages: Sequence[Passage], limit: int) -> Iterator[str]:
    """What the reader of an answer should know; passages are counted from 1, as shown."""
    for note in generation.notes:
        id_ = passages[note.passage].id
        name = f"Passage {note.passage + 1}" + ("" if id_ is None else f" ({id_})")
        if note.kind == "duplicate" and note.of is not None:
            yield f"{name} repeats passage {note.of + 1}, which was read instead."
        elif note.kind == "split":
            yield f"{name} is longer than a window and was read in several."
        else:
            yield f"{name} holds no text that the model knows and was left out."
    if generation.fallback is not None:
        yield f"Guard ({generation.fallback.signal}): {generation.fallback.message}"
    if generation.finish_reason == "length":
        yield f"The answer ends at the limit of {limit} new tokens; --max-new-tokens raises it."


def _converse(
    replies: _Replies, retriever: BM25Retriever, top_k: int, *, interactive: bool
) -> None:
    """Answer line after line of standard input until /exit or its end.

    On a terminal, Ctrl-C stops an answer and an error ends only its turn; with input from a file or
    a pipe both end the conversation.
    """
    from rag_windows.prompt.conversation import search_text

    dialogue: list[Mapping[str, str]] = []
    as_json = replies.options.json
    for line in _typed(as_json) if interactive else sys.stdin or ():
        question = encodable(line).strip()
        if question == "/exit":
            return
        if question == "/clear":
            dialogue = []
            tell("The conversation is forgotten.")
        elif question == "/help":
            tell(_HELP)
        if question in ("", "/clear", "/help"):
            continue
        found = retriever.retrieve(search_text(dialogue, question), top_k)
        heard: list[str] = []
        query = [*dialogue, {"role": "user", "content": question}]
        try:
            answer = replies.reply(query, found, () if found else (_NO_HITS,), heard.append).text
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
        dialogue = [*query, {"role": "assistant", "content": answer}]


def _typed(as_json: bool) -> Iterator[str]:
    """Lines that are typed at a prompt."""
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
            except (EOFError, KeyboardInterrupt) as stop:
                print()
                if isinstance(stop, EOFError):
                    return
                raise
        else:
            print(_PROMPT, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return
        yield line
