"""The commands `ask`, `chat` and `demo`: questions over documents."""

from __future__ import annotations

import itertools
import json as json_format
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.cells import cell_len, set_cell_size

from rag_windows.cli import options
from rag_windows.cli.options import (
    DEFAULT_METHOD,
    ModelOptions,
    SearchOptions,
    loaded_model,
    open_corpus,
    option,
)
from rag_windows.cli.render import (
    console,
    progress,
    show,
    show_notes,
    tell,
    write_json,
)
from rag_windows.errors import GenerationError, InputError, RagWindowsError
from rag_windows.passage import Passage
from rag_windows.prompt.visible_text import encodable, one_line, visible
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows import Generation, WindowedLM
    from rag_windows_retrievers import BM25Retriever


_PROMPT = "> "
_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves."
_NAME, _BAR, _TEXTS_FROM = 32, 16, 72
"""Widths in characters: of names and bars, and of terminals that have room for texts and bars."""


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
        _reply(lm, model.name, answer, question, passages, notes, [])


@options.spreading()
def chat(*, search: SearchOptions, model: ModelOptions, answer: AnswerOptions) -> None:
    """The same as a conversation: one question a line, follow-ups welcome, /exit leaves."""
    from rag_windows.prompt.conversation import search_text

    retriever, notes = open_corpus(search, model.model)
    # A process may be started without any standard input.
    interactive = sys.stdin is not None and sys.stdin.isatty()
    dialogue: list[Mapping[str, str]] = []
    with loaded_model(model) as lm:
        for note in notes:
            tell(f"Note: {note}")
        if interactive:
            tell(f"{len(retriever.passages)} passages, {model.name}. {_HELP}")
        for line in _typed() if interactive else sys.stdin or ():
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
            found = retriever.retrieve(search_text(dialogue, question), search.top_k)
            query = [*dialogue, {"role": "user", "content": question}]
            heard: list[str] = []
            # On a terminal, Ctrl-C stops an answer and an error ends only its turn.
            try:
                _reply(lm, model.name, answer, query, found, (), heard)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print("" if answer.json else "\n", end="")
                tell("Stopped.")
            except RagWindowsError as error:
                if not interactive:
                    raise
                tell(f"Error: {error} {_HELP}")
                continue
            dialogue = [*query, {"role": "assistant", "content": "".join(heard)}]


def _typed() -> Iterator[str]:
    """Lines that are typed at a prompt."""
    with suppress(ModuleNotFoundError):  # Windows has none
        import readline  # noqa: F401 - importing it is what makes input() edit lines
    while True:
        shown = sys.stdout.isatty()
        if not shown:
            print(_PROMPT, end="", file=sys.stderr, flush=True)
        try:
            yield input(_PROMPT if shown else "")
        except EOFError:
            return


def _reply(
    lm: WindowedLM,
    name: str,
    told: AnswerOptions,
    query: str | Sequence[Mapping[str, str]],
    passages: Sequence[Passage],
    notes: Sequence[str],
    heard: list[str],
) -> None:
    """Answer as text with its sources, or one JSON object; `heard` gets the text as it comes."""
    from rag_windows.methods import linked
    from rag_windows.sampling import sampling_options

    settings = {
        "prefix": told.system,
        "max_new_tokens": told.max_new_tokens,
        "seed": told.seed,
        "link_tokens": told.link_tokens,
        "fallback": told.fallback,
        **sampling_options(told.temperature),
    }
    method = linked(lm.method, told.link_tokens).name
    with progress("Encoding the passages" if passages else "Answering") as on_encoded:
        stream = lm.stream(query, passages, on_encoded=on_encoded, **settings)
        begun = next(stream)
    generation = begun.generation
    # A stream that is closed stops its work, also on Ctrl-C.
    with closing(stream):  # type: ignore[type-var]  # has close()
        for chunk in itertools.chain([begun], stream):
            heard.append(chunk.text)
            if not told.json:
                sys.stdout.write(visible(chunk.text))
                sys.stdout.flush()
            generation = chunk.generation
    if generation is None:
        raise GenerationError("The stream ended without a result; please report this.")
    notes = [*notes, *_notes(generation, passages, told.max_new_tokens)]
    usage, timings, fallback = generation.usage, generation.timings, generation.fallback
    found = {one.passage: one.mass for one in generation.citations or ()}
    weights = [found.get(index) for index in range(len(passages))]
    if told.json:
        counts = ("prompt_tokens", "cached_tokens", "completion_tokens")
        fields = ("id", "title", "text", "score")
        write_json(
            {
                "answer": generation.text,
                "passages": [
                    {**{field: getattr(one, field) for field in fields}, "mass": weight}
                    for one, weight in zip(passages, weights, strict=True)
                ],
                "usage": {count: getattr(usage, count) for count in counts},
                "timings": asdict(timings),
                "method": method,
                "model": name,
                "fallback": None if fallback is None else fallback.as_dict(),
            }
        )
        show_notes(notes, as_json=True)
        return
    print("\n")
    _show_passages(generation, passages, weights)
    show_notes(notes, as_json=False)
    show(
        f"{name}, {method}: passages encoded in {timings.encode_s:.2f} s, first token "
        f"after {timings.ttft_s:.2f} s, all after {timings.total_s:.2f} s; "
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated.",
        "dim",
    )


def _show_passages(
    generation: Generation, passages: Sequence[Passage], weights: Sequence[float | None]
) -> None:
    """Print the passages, each with its attention weight, and what got the rest.

    A terminal with room shows their texts, and the weights as bars, too.
    """
    if not passages:
        return
    out = console()
    longest = max((weight for weight in weights if weight is not None), default=0.0)
    names = [one_line(one.id or one.title or "-") for one in passages]
    room, wide = out.width - len("00  ") - len("  00.0%"), out.width >= _TEXTS_FROM
    width = min(max(map(cell_len, names)), _NAME if wide else room)
    block = "█" if out.encoding.lower().startswith("utf") else "#"
    for number, (name, passage, weight) in enumerate(zip(names, passages, weights, strict=True), 1):
        # Of a long path, the end tells most.
        line = f"{number:<4}{set_cell_size(name[-width:], width)}"
        if wide:
            title = f"{one_line(passage.title)}: " if passage.title else ""
            text = set_cell_size(title + one_line(passage.text[:400]), room - width - _BAR - 4)
            line += f"  {text}  {block * round(_BAR * (weight or 0.0) / (longest or 1.0)):<{_BAR}}"
        print(line + ("" if weight is None else f"{weight:>7.1%}"))
    if generation.prefix_mass is not None and generation.query_mass is not None:
        show(
            f"The rest of the attention: prefix {generation.prefix_mass:.1%}, "
            f"question and answer {generation.query_mass:.1%}.",
            "dim",
        )


def _notes(generation: Generation, passages: Sequence[Passage], limit: int) -> Iterator[str]:
    """What the reader of an answer should know; passages are counted from 1, as shown."""
    if not passages:
        yield "No passage shares a word with the question, so the model answered without any."
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


METHODS = ("sequential", DEFAULT_METHOD)
_ANSWER_TOKENS, _RUNS = 32, 3


def demo(
    device: options.Device = "auto", json: options.Json = False, verbose: options.Verbose = False
) -> None:
    """Answer three questions over the sample corpus, sequentially and with windows."""
    retriever, _ = open_corpus(SearchOptions(), None)
    tasks = json_format.loads((samples_path() / "demo.json").read_text(encoding="utf-8"))
    with loaded_model(ModelOptions(device=device, no_cache=True, verbose=verbose)) as lm:
        # The first call of a process pays for lazy set-up that no method is to be charged with.
        for method in METHODS:
            lm.generate("Why?", retriever.passages[:2], method=method, max_new_tokens=2)
        with progress("Answering"):
            rows = [_answer(lm, retriever, task, method) for task in tasks for method in METHODS]
    if json:
        write_json(rows)
        return
    for row in rows:
        if row["method"] == METHODS[0]:
            show(f"{row['question']} ({row['passages']} passages)", "bold")
        right = "right" if row["right"] else f"wrong: {row['expected']}"
        first = f"first token after {row['first_token_s']:.3f} s"
        show(f"  {row['method']:<12}{first}  {one_line(row['answer'])} ({right})")
    show(f"Seconds to the first token: the best of {_RUNS} runs.", "dim")


def _answer(
    lm: WindowedLM, retriever: BM25Retriever, task: dict[str, Any], method: str
) -> dict[str, Any]:
    """What a method makes of a question; the fastest of several runs."""
    question, top_k = task["question"], task["top_k"]
    passages = retriever.retrieve(question, top_k)
    found = {one.id for one in passages}
    # Where fewer share a word with the question, any others stand behind them.
    others = (one for one in retriever.passages if one.id not in found)
    passages += itertools.islice(others, top_k - len(passages))
    greedy: dict[str, Any] = {"max_new_tokens": _ANSWER_TOKENS, "do_sample": False}
    runs = [lm.generate(question, passages, method=method, **greedy) for _ in range(_RUNS)]
    best = min(runs, key=lambda one: one.timings.ttft_s)
    return {
        "question": question,
        "passages": len(passages),
        "method": method,
        "answer": best.text.strip(),
        "expected": task["answer"],
        "first_token_s": best.timings.ttft_s,
        "right": _words(best.text) == _words(task["answer"]),
    }


def _words(text: str) -> list[str]:
    words = re.findall(r"\w+", text.casefold())
    return [word for word in words if word not in ("a", "an", "the")]
