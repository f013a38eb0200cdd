"""The command `calibrate`: choosing a method's numbers for a model and its documents."""

from __future__ import annotations

import dataclasses
import json as json_format
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from rag_windows.cli import options, render
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.models import ModelOptions, closing_cache, load_model
from rag_windows.cli.progress import Progress
from rag_windows.errors import InputError, MissingExtraError, missing
from rag_windows.prompt.visible_text import encodable
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows.calibration import Example, Profile

_SHOWN = 10

Examples = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='JSONL with "query", and perhaps "passages", "answer" and "kind". Without passages '
        "they are retrieved from --docs. Default: the sample corpus's questions.",
    ),
]
Calibrated = Annotated[
    str, typer.Option(metavar="NAME", help="Whose numbers to choose; see rag-windows methods.")
]
Out = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the profile here, for --profile.")
]
Plot = Annotated[str | None, typer.Option(metavar="FILE", help="Draw all settings into this PNG.")]
By = Annotated[
    Literal["auto", "labels", "agreement"],
    typer.Option(
        help="What decides: right answers, or agreement with sequential reading; auto takes "
        "answers where every example has one."
    ),
]
Limit = Annotated[int, typer.Option(min=1, metavar="N", help="Take the first N examples at most.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Of folds and intervals.")]


@options.spreading(without=("method", "profile", "rag_temperature", "rag_scale"))
def calibrate(
    *,
    examples: Examples = None,
    search: SearchOptions,
    method: Calibrated = "ape",
    out: Out = None,
    plot: Plot = None,
    by: By = "auto",
    limit: Limit = 64,
    max_new_tokens: options.MaxNewTokens = 32,
    system: options.System = None,
    seed: Seed = 0,
    model: ModelOptions,
    json: options.Json = False,
) -> None:
    """Choose a method's numbers for a model and its documents, and say whether they beat the usual.

    Give the instruction (--system) and the lengths that the questions will have.
    """
    search.check_reader(model.model)
    _check_target("--out", out)
    _check_target("--plot", plot)
    if plot is not None and find_spec("matplotlib") is None:
        raise MissingExtraError(missing("The picture", "matplotlib", "figures"))
    progress = Progress()
    given, notes = load_examples(search, examples, limit, progress)
    lm = load_model(model, progress)
    begun = time.perf_counter()
    with closing_cache(lm), _phases(progress) as on_progress:
        profile = lm.calibrate(
            given,
            method=method,
            by=None if by == "auto" else by,
            prefix=None if system is None else encodable(system),
            max_new_tokens=max_new_tokens,
            seed=seed,
            on_progress=on_progress,
        )
    seconds = time.perf_counter() - begun
    if out is not None:
        profile.save(out)
    if plot is not None:
        profile.plot(plot)
    if json:
        render.write_json(json_format.loads(profile.to_json()))
    else:
        _show(profile)
    render.write_notes([*notes, *profile.left_out], as_json=json)
    if json:
        return
    render.dim(f"{profile.examples} examples, {len(profile.settings)} settings, {seconds:.1f} s.")
    if out is not None:
        render.dim(f"Wrote {out}. Use it: --profile {out}")
    if plot is not None:
        render.dim(f"Wrote {plot}.")


def load_examples(
    search: SearchOptions, path: str | None, limit: int, progress: Progress
) -> tuple[list[Example], list[str]]:
    """The examples, with retrieved passages where they bring none, and what to tell of them.

    Args:
        search: where passages come from.
        path: of the examples; None for those of the sample corpus.
        limit: how many are taken at most.
        progress: shows what goes on.

    Raises:
        InputError: documents without questions, or questions without documents.
    """
    from rag_windows.calibration import read_examples

    if path is not None:
        examples = read_examples(path)
    elif search.docs:
        raise InputError(
            "--docs alone can't be calibrated on: give questions over them with --examples."
        )
    else:
        examples = sample_examples()
    examples = examples[:limit]
    bare = [place for place, one in enumerate(examples) if not one.passages]
    if not bare:
        notes = ["Every example has passages of its own; --docs was not read."]
        return examples, notes if search.docs else []
    if path is not None and not search.docs:
        raise InputError(
            f"Example {bare[0] + 1} of {path!r} has no passages: give it some, or the documents to "
            "retrieve them from, with --docs."
        )
    corpus = open_corpus(search, progress)
    for place in bare:
        one = examples[place]
        found = corpus.retriever.retrieve(_search_text(one), search.top_k)
        examples[place] = dataclasses.replace(one, passages=found)
    return examples, list(corpus.notes)


def sample_examples() -> list[Example]:
    """The sample corpus's questions with their answers, not yet with passages."""
    from rag_windows.calibration import Example

    text = (samples_path() / "questions.jsonl").read_text(encoding="utf-8")
    rows = [json_format.loads(line) for line in text.splitlines()]
    # Every second one, so that all kinds of questions among them are taken.
    return [Example(row["question"], (), row["answer"], row["task"]) for row in rows[::2]]


def _search_text(example: Example) -> str:
    """What passages are retrieved with: the question, or the words of a conversation's turns."""
    if isinstance(example.query, str):
        return example.query
    if not isinstance(example.query, list | tuple):
        raise InputError("Examples with tools need passages of their own.")
    turns = [str(one.get("content", "")) for one in example.query]
    return "\n".join([*turns[:-1], *turns[-1:] * 4])


def _check_target(flag: str, path: str | None) -> None:
    """What would fail after the work fails before it."""
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise InputError(f"{flag} {path!r}: the folder does not exist, or this is one.")


def _show(profile: Profile) -> None:
    """Print the best settings and the default as a table, and the verdict."""
    from rag_windows.calibration.profile import FIGURES, label

    ranked = profile.ranked()
    shown = ranked[:_SHOWN]
    default = profile.setting(profile.default)
    if default not in shown:
        shown = [*shown, default]
    names = list(dict.fromkeys([*profile.criteria, *(n for n in FIGURES if n in default.figures)]))
    table = render.plain_table()
    table.add_column("", justify="right", style="dim")
    table.add_column("setting", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in shown:
        named = (("chosen", profile.method), ("default", profile.default))
        marks = [mark for mark, method in named if one.method == method]
        cells = [Text(label(one.method), style="bold" if "chosen" in marks else "")]
        for name in names:
            mean = one.figures.get(name)
            figure = "" if mean is None else f"{mean.value:.3g}"
            if mean is not None and name == profile.criteria[0]:
                figure += f" ({mean.low:.3g} to {mean.high:.3g})"
            cells.append(Text(figure))
        table.add_row(str(ranked.index(one) + 1), *cells, ", ".join(marks))
    out = render.console()
    out.print(table)
    for name in names:
        interval = ", with its 95% interval" if name == profile.criteria[0] else ""
        render.dim(f"{name}: {FIGURES[name]}{interval}.")
    if profile.guard is not None:
        out.print(
            f"A spread of attention above {profile.guard['threshold']:.2f} looks multi-hop "
            f"({profile.guard['false_alarms']:.0%} false alarms, {profile.guard['missed']:.0%} "
            "missed).",
            soft_wrap=True,
        )
    out.print(profile.verdict, style="bold", soft_wrap=True)


@contextmanager
def _phases(progress: Progress) -> Iterator[Callable[[str, int, int | None], None]]:
    """One bar a phase of the work, on terminals."""
    with ExitStack() as stack:
        shown: dict[str, Callable[[int, int], None]] = {}

        def on_progress(what: str, done: int, whole: int | None) -> None:
            if what not in shown:
                stack.close()
                shown.clear()
                shown[what] = stack.enter_context(progress.counting(what))
            shown[what](done, whole or 0)

        yield on_progress
