"""The commands `ask`, `chat` and `demo`: questions over documents."""

from __future__ import annotations

import itertools
import json as json_format
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Column

from rag_windows.cli import options, render
from rag_windows.cli.corpus import SearchOptions, how_many, open_corpus
from rag_windows.cli.model_loading import (
    DEFAULT_MODEL,
    SAMPLE_MODEL,
    LoadOptions,
    instruction,
    loaded_model,
    method_of,
)
from rag_windows.cli.options import option
from rag_windows.errors import GenerationError, InputError, RagWindowsError
from rag_windows.passage import Passage
from rag_windows.samples import samples_path
from rag_windows.visible_text import encodable, one_line, visible

if TYPE_CHECKING:
    from rag_windows import Citation, Generation, Usage, WindowedLM
    from rag_windows.cli.corpus import Corpus


_HELP = "/clear starts a new conversation, /exit or Ctrl-D ends the chat."
_NAME, _BAR, _TEXTS_FROM = 32, 16, 72
"""Widths in characters: of names and bars, and of terminals that have width for texts and bars."""


def _citations(value: str) -> str:
    if value != "attention":
        from rag_windows.request import Removals  # imports torch, which only this value needs here

        try:
            Removals.of(value)
        except InputError as error:
            wanted = "attention, removal, or such as removal:top=4"
            raise typer.BadParameter(f"{value!r} must be {wanted}") from error
    return value


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is written and shown; each field is the option of its name."""

    system: options.Instruction = None
    max_new_tokens: options.MaxNewTokens = 128
    temperature: Annotated[
        float | None,
        option("T", "Sampling temperature; 0 always takes the likeliest token.", min=0.0),
    ] = None
    seed: Annotated[int | None, option("N", "Random seed; makes sampling repeatable.")] = None
    link_tokens: options.LinkTokens = None
    link_choose: options.LinkChoose = "first"
    fallback: Annotated[
        Literal["sequential"] | None,
        option(
            None, "Read the passages one after the other where windows are likely to answer worse."
        ),
    ] = None
    citations: Annotated[
        str,
        option(
            "KIND",
            "What shows the sources: attention, or removal, which leaves each passage out and says "
            "what the answer loses; removal:top=4 leaves out the four with most attention.",
            callback=_citations,
        ),
    ] = "attention"
    json: options.Json = False


@options.spreading()
def ask(
    *,
    question: Annotated[
        str,
        typer.Argument(metavar="QUESTION", help="The question, in quotes.", parser=encodable),
    ],
    search: SearchOptions,
    model: LoadOptions,
    answer: AnswerOptions,
) -> None:
    """Answer one question over documents and show how much attention each passage got."""
    from rag_windows_retrievers import SUFFIXES

    _check(model, answer)
    if not question.strip():
        raise InputError("The question is empty. Write one, in quotes.")
    if len(question.split()) == 1 and Path(question).suffix.lower() in SUFFIXES:
        raise InputError(
            f"The question {question!r} is the name of a file. Put --docs before each file, and "
            "the question in quotes."
        )
    passages = open_corpus(search, model).retrieve(question, search.top_k)
    with loaded_model(model) as lm:
        _reply(lm, model.name, answer, question, passages, [])
    if model.model is None and not answer.json:
        render.show(SAMPLE_MODEL, "dim")


@options.spreading()
def chat(*, search: SearchOptions, model: LoadOptions, answer: AnswerOptions) -> None:
    """Answer questions over documents in a conversation: one question a line, /exit ends it."""
    from rag_windows.prompt.conversation import search_text

    _check(model, answer)
    retriever = open_corpus(search, model)
    # A process may be started without any standard input.
    interactive = sys.stdin is not None and sys.stdin.isatty()
    dialogue: list[Mapping[str, str]] = []
    with loaded_model(model) as lm:
        if interactive:
            if model.model is None:
                render.tell(SAMPLE_MODEL)
            render.tell(f"{how_many(retriever)} passages, {model.name}. {_HELP}")
        for line in _typed() if interactive else sys.stdin or ():
            question = encodable(line).strip()
            if question == "/exit":
                return
            if question == "/clear":
                dialogue = []
                render.tell("The conversation starts again.")
            elif question == "/help":
                render.tell(_HELP)
            if question in ("", "/clear", "/help"):
                continue
            found = retriever.retrieve(search_text(dialogue, question), search.top_k)
            query = [*dialogue, {"role": "user", "content": question}]
            heard: list[str] = []
            # On a terminal, Ctrl-C stops an answer and an error ends only its turn.
            try:
                _reply(lm, model.name, answer, query, found, heard)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print("" if answer.json else "\n", end="")
                render.tell("Stopped.")
            except RagWindowsError as error:
                if not interactive:
                    raise
                render.tell(f"Error: {error} {_HELP}")
                continue
            dialogue = [*query, {"role": "assistant", "content": "".join(heard)}]


def _check(model: LoadOptions, answer: AnswerOptions) -> None:
    """Refuse what is wrong before documents are read and a model is loaded."""
    model.check(answer.link_tokens, answer.link_choose)
    named = method_of(model)
    if named is not None and answer.citations != "attention":
        from rag_windows.methods import linked
        from rag_windows.request import check_citations

        check_citations(answer.citations, linked(named, answer.link_tokens, answer.link_choose))


def _typed() -> Iterator[str]:
    """Lines that are typed at a prompt."""
    with suppress(ModuleNotFoundError):  # Windows has none
        import readline  # noqa: F401 - importing it is what makes input() edit lines
    with suppress(EOFError):
        while True:
            # Without a terminal to write to, it would stand among the answers.
            yield input("> " if sys.stdout.isatty() else "")


def _reply(
    lm: WindowedLM,
    name: str,
    asked: AnswerOptions,
    query: str | Sequence[Mapping[str, str]],
    passages: Sequence[Passage],
    heard: list[str],
) -> None:
    """Answer as text with its sources, or one JSON object; `heard` gets the text as it comes."""
    from rag_windows.methods import linked
    from rag_windows.sampling import sampling_options

    system = instruction(asked.system, name, lm)
    settings = {
        "prefix": system,
        "max_new_tokens": asked.max_new_tokens,
        "seed": asked.seed,
        "link_tokens": asked.link_tokens,
        "link_choose": asked.link_choose,
        "fallback": asked.fallback,
        "citations": asked.citations == "attention" or asked.citations,
        **sampling_options(asked.temperature),
    }
    method = linked(lm.method, asked.link_tokens).name
    # Some methods read the question over each passage before they answer.
    with render.progress(
        "Encoding the passages" if passages else "Answering", "Reading the question"
    ) as on_encoded:
        stream = lm.stream(query, passages, on_encoded=on_encoded, **settings)
        begun = next(stream)
    if begun.generation is None and not begun.text:
        with render.progress("Thinking"):
            begun = next(one for one in stream if one.text or one.generation is not None)
    generation = begun.generation
    # JSON comes as a whole; a text shows by itself how far it is.
    waiting = render.progress("Answering") if asked.json else nullcontext()
    # A stream that is closed stops its work, also on Ctrl-C.
    with closing(stream), waiting:  # type: ignore[type-var]  # has close()
        for chunk in itertools.chain([begun], stream):
            heard.append(chunk.text)
            if not asked.json:
                sys.stdout.write(visible(chunk.text))
                sys.stdout.flush()
            generation = chunk.generation
    if generation is None:
        raise GenerationError(
            "The stream ended without a result. This is a bug in rag-windows: please report it."
        )
    notes = list(_notes(generation, passages, asked.max_new_tokens))
    usage, timings, fallback = generation.usage, generation.timings, generation.fallback
    found = {one.passage: one for one in generation.citations or ()}
    citations = [found.get(index) for index in range(len(passages))]
    if asked.json:
        counts = ("prompt_tokens", "cached_tokens", "completion_tokens")
        fields = ("id", "title", "text", "score")
        render.write_json(
            {
                "answer": generation.text,
                "passages": [
                    {
                        **{field: getattr(one, field) for field in fields},
                        "mass": None if cited is None else cited.mass,
                        "drop": None if cited is None else cited.drop,
                        "supports": None if cited is None else cited.supports,
                    }
                    for one, cited in zip(passages, citations, strict=True)
                ],
                "supported": generation.supported,
                "statements": [asdict(one) for one in generation.statements],
                "usage": {count: getattr(usage, count) for count in counts},
                "timings": asdict(timings),
                "method": method,
                "model": name,
                "fallback": None if fallback is None else fallback.as_dict(),
                **({"reasoning": generation.reasoning} if generation.reasoning else {}),
                "system": system,
                "notes": notes,
            }
        )
        render.show_notes(notes, as_json=True)
        return
    print("\n")
    _show_passages(passages, citations)
    render.show_notes(notes, as_json=False)
    render.show(
        f"{name}, {method}: {_encoded(usage)} ready after {timings.encode_s:.2f} s, first token "
        f"after {timings.ttft_s:.2f} s, all after {timings.total_s:.2f} s; "
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated.",
        "dim",
    )


def _encoded(usage: Usage) -> str:
    """What was computed before the answer, and what was only read."""
    cached = usage.cached_windows
    counts = {"encoded": usage.windows - cached, "read from the cache": cached}
    shown = [f"{count} {what}" for what, count in counts.items() if count]
    return f"windows: {', '.join(shown)}," if shown else "nothing to encode,"


def _show_passages(passages: Sequence[Passage], citations: Sequence[Citation | None]) -> None:
    """Print passages with their attention; on a wide terminal their texts and bars, too.

    Where passages were left out, a last column says what the answer loses without each of them.
    """
    if not passages:
        return
    out = render.console()
    wide = out.width >= _TEXTS_FROM
    drops = any(one is not None and one.drop is not None for one in citations)
    proof = [Column(justify="right", no_wrap=True)] if drops else []
    width = (
        out.width - len("00  ") - len("  00.0%") - (len("  supports, -000.0 nats") if drops else 0)
    )
    width = _NAME if wide else max(width, 8)
    text, bar = Column(ratio=1, no_wrap=True, overflow="crop"), Column(width=_BAR)
    name, share = Column(no_wrap=True, overflow="crop"), Column(justify="right", no_wrap=True)
    table = render.plain_table("", name, *((text, bar) if wide else ()), share, *proof)
    table.show_header, table.expand = False, wide
    utf = out.encoding.lower().startswith("utf")
    for number, (passage, cited) in enumerate(zip(passages, citations, strict=True), 1):
        weight = None if cited is None else cited.mass
        shown = one_line(passage.id or passage.title or "-")
        cells = [str(number), _shortened(shown, width, "…" if utf else "...")]
        if wide:
            place = passage.place and f"({passage.place})"
            about = one_line(" ".join(one for one in (passage.title, place) if one))
            cells.append(": ".join(one for one in (about, one_line(passage.text[:400])) if one))
            cells.append(_bar(weight or 0.0, utf=utf))
        table.add_row(*cells, "" if weight is None else f"{weight:.1%}", *[_proof(cited)] * drops)
    out.print(table)


_SUPPORTS = {"yes": "supports", "no": "", "unsure": "unsure"}


def _proof(citation: Citation | None) -> str:
    """What the answer loses without a passage, and what that says."""
    if citation is None or not citation.drop or citation.supports is None:
        return ""
    loss = f"{-citation.drop:+.1f} nats"
    return ", ".join(filter(None, (_SUPPORTS[citation.supports], loss)))


def _bar(share: float, *, utf: bool) -> str:
    """A share of 1 as a bar, of which a whole one is _BAR characters."""
    whole, eighths = divmod(round(share * _BAR * 8), 8)
    if not utf:
        return "#" * round(share * _BAR)
    return "█" * whole + ("", *"▏▎▍▌▋▊▉")[eighths]


def _shortened(text: str, width: int, dots: str) -> str:
    """A long text without its middle: a path's beginning and its end tell most."""
    if len(text) <= width:
        return text
    left = max(width - len(dots), 0)
    end = left * 2 // 3
    return f"{text[: left - end]}{dots}{text[len(text) - end :]}"[-width:]


def _notes(generation: Generation, passages: Sequence[Passage], limit: int) -> Iterator[str]:
    """What the reader of an answer should know; passages are counted from 1, as shown."""
    if not passages:
        yield "No passage shares a word with the question, so the model answered without passages."
    for note in generation.notes:
        if note.passage is None:
            yield note.message
            continue
        id_ = passages[note.passage].id
        name = f"Passage {note.passage + 1}" + ("" if id_ is None else f" ({id_})")
        if note.kind == "duplicate" and note.of is not None:
            yield f"{name} repeats passage {note.of + 1}, which was read instead."
        elif note.kind == "split":
            yield f"{name} is longer than a window and was read in several."
        elif note.kind == "header":
            yield f"{name} has a title that is too long for a window; only its beginning was read."
        elif note.kind == "alone":
            yield f"{name} is a later chunk of its document, and was encoded without those before."
        else:
            yield f"{name} holds no text that the model can read and was left out."
    if generation.supported is False:
        yield "No passage supports the answer: they hardly make it likelier. It may be made up."
    if generation.fallback is not None:
        yield f"Guard ({generation.fallback.signal}): {generation.fallback.message}"
    if generation.finish_reason == "length":
        raised = "--max-new-tokens raises this limit."
        if generation.text or not generation.reasoning:
            yield f"The answer was cut at {limit} new tokens; {raised}"
        else:
            yield (
                f"The reasoning was cut at {limit} new tokens; {raised} Some models answer without "
                "any after --template-option enable_thinking=false."
            )


def demo(
    model: options.Model = DEFAULT_MODEL,
    device: options.Device = "auto",
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Answer three questions over the sample corpus, first sequentially, then with windows."""
    retriever = open_corpus(SearchOptions(), LoadOptions())
    tasks = json_format.loads((samples_path() / "demo.json").read_text(encoding="utf-8"))
    asked = LoadOptions(model=model, device=device, no_cache=True, verbose=verbose)
    rows: list[dict[str, Any]] = []
    with loaded_model(asked) as lm, render.progress("Answering") as answered:
        pairs = [(task, method) for task in tasks for method in ("sequential", lm.method.name)]
        for task, method in pairs:
            answered(len(rows), len(pairs))
            rows.append({"model": model, **_answer(lm, model, retriever, task, method)})
    if json:
        render.write_json(rows)
        return
    for row in rows:
        if row["method"] == "sequential":
            render.show(f"{row['question']} ({row['passages']} passages)", "bold")
        right = "right" if row["right"] else f"wrong: {row['expected']}"
        first = f"first token after {row['first_token_s']:.3f} s"
        render.show(f"  {row['method']:<12}{first}  {one_line(row['answer'])} ({right})")
    render.show("Times to the first token are the best of three runs.", "dim")


def _answer(
    lm: WindowedLM, name: str, retriever: Corpus, task: dict[str, Any], method: str
) -> dict[str, Any]:
    """What a method makes of a question; the fastest of several runs."""
    from rag_windows.calibration.words import contains

    question, top_k = task["question"], task["top_k"]
    passages = retriever.retrieve(question, top_k)
    found = {one.id for one in passages}
    # Where fewer share a word with the question, any others stand behind them.
    passages += [one for one in retriever.passages if one.id not in found][: top_k - len(found)]
    greedy: dict[str, Any] = {
        "prefix": instruction(None, name, lm),
        "max_new_tokens": 32,
        "do_sample": False,
    }
    runs = [lm.generate(question, passages, method=method, **greedy) for _ in range(3)]
    best = min(runs, key=lambda one: one.timings.ttft_s)
    return {
        "question": question,
        "passages": len(passages),
        "method": method,
        "answer": best.text.strip(),
        "expected": task["answer"],
        "first_token_s": best.timings.ttft_s,
        "right": contains(best.text, task["answer"]),
    }
