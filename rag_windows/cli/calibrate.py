"""Choosing a method's numbers from the command line."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rag_windows.cli import render
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.engine import ModelOptions, closing_cache, load_model
from rag_windows.cli.errors import tell
from rag_windows.cli.progress import Progress
from rag_windows.errors import InputError, MissingExtraError, missing
from rag_windows.prompt.visible_text import encodable, visible
from rag_windows.sample_files import samples_path

if TYPE_CHECKING:
    from rag_windows.calibration import Example, Profile

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What is calibrated on what, and where the result goes."""

    examples: str | None = None
    method: str = "ape"
    by: Literal["labels", "agreement"] | None = None
    limit: int = 64
    system: str | None = None
    max_new_tokens: int = 32
    seed: int = 0
    out: str | None = None
    plot: str | None = None
    as_json: bool = False


def calibrate(search: SearchOptions, options: CalibrateOptions, model: ModelOptions) -> None:
    """Calibrate, write the profile and the picture, and show the table.

    Raises:
        RagWindowsError: see `WindowedLM.calibrate`, `read_examples`, `open_corpus`, `load_model`.
    """
    _check_targets(options)
    progress = Progress()
    examples, notes = load_examples(search, options, progress)
    lm = load_model(model, progress)
    begun = time.perf_counter()
    with closing_cache(lm), _phases(progress) as on_progress:
        profile = lm.calibrate(
            examples,
            method=options.method,
            by=options.by,
            prefix=None if options.system is None else encodable(options.system),
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
            on_progress=on_progress,
        )
    seconds = time.perf_counter() - begun
    if options.out is not None:
        profile.save(options.out)
    if options.plot is not None:
        profile.plot(options.plot)
    notes = [*notes, *profile.left_out]
    if options.as_json:
        render.write_json(json.loads(profile.to_json()))
        for note in notes:
            tell(f"Note: {note}")
        return
    out = render.console()
    show(out, profile)
    for note in notes:
        out.print(f"Note: {visible(note)}", style="yellow", soft_wrap=True)
    out.print(
        f"{profile.examples} examples, {len(profile.settings)} settings, {seconds:.1f} s.",
        style="dim",
    )
    for path, use in ((options.out, f" Use it: --profile {options.out}"), (options.plot, "")):
        if path is not None:
            out.print(f"Wrote {visible(path)}.{visible(use)}", style="dim", soft_wrap=True)


def load_examples(
    search: SearchOptions, options: CalibrateOptions, progress: Progress
) -> tuple[list[Example], list[str]]:
    """The examples, with retrieved passages where they bring none, and what to tell of them.

    Raises:
        InputError: documents without questions, or questions without documents.
    """
    from rag_windows.calibration import read_examples

    if options.examples is None:
        if search.docs:
            raise InputError(
                "--docs alone can't be calibrated on: give questions over them with --examples."
            )
        examples = sample_examples()
    else:
        examples = read_examples(options.examples)
    examples = examples[: options.limit]
    bare = [place for place, one in enumerate(examples) if not one.passages]
    if not bare:
        notes = ["Every example has passages of its own; --docs was not read."]
        return examples, notes if search.docs else []
    if options.examples is not None and not search.docs:
        raise InputError(
            f"Example {bare[0] + 1} of {options.examples!r} has no passages: give it some, or the "
            "documents to retrieve them from, with --docs."
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
    rows = [json.loads(line) for line in text.splitlines()]
    # Every second one, so that all kinds of questions among them are taken.
    return [Example(row["question"], (), row["answer"], row["task"]) for row in rows[::2]]


def show(out: Console, profile: Profile) -> None:
    """Print the best settings and the default as a table, and the verdict."""
    from rag_windows.calibration.profile import FIGURES, label

    ranked = profile.ranked()
    shown = ranked[:_SHOWN]
    default = profile.setting(profile.default)
    if default not in shown:
        shown = [*shown, default]
    names = [*profile.criteria]
    names += [name for name in FIGURES if name in default.figures and name not in names]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", justify="right", style="dim")
    table.add_column("setting", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in shown:
        marks = []
        if one.method == profile.method:
            marks.append("chosen")
        if one.method == profile.default:
            marks.append("default")
        cells = [Text(label(one.method), style="bold" if "chosen" in marks else "")]
        for name in names:
            mean = one.figures.get(name)
            shown_mean = "" if mean is None else f"{mean.value:.3g}"
            if mean is not None and name == profile.criteria[0]:
                shown_mean += f" ({mean.low:.3g} to {mean.high:.3g})"
            cells.append(Text(shown_mean))
        table.add_row(str(ranked.index(one) + 1), *cells, ", ".join(marks))
    out.print(table)
    for name in names:
        interval = ", with its 95% interval" if name == profile.criteria[0] else ""
        out.print(f"{name}: {FIGURES[name]}{interval}.", style="dim", soft_wrap=True)
    if profile.guard is not None:
        out.print(
            f"A spread of attention above {profile.guard['threshold']:.2f} looks multi-hop "
            f"({profile.guard['false_alarms']:.0%} false alarms, {profile.guard['missed']:.0%} "
            "missed).",
            soft_wrap=True,
        )
    out.print(profile.verdict, style="bold", soft_wrap=True)


def _search_text(example: Example) -> str:
    """What passages are retrieved with: the question, or the words of a conversation's turns."""
    if isinstance(example.query, str):
        return example.query
    if not isinstance(example.query, list | tuple):
        raise InputError("Examples with tools need passages of their own.")
    turns = [str(one.get("content", "")) for one in example.query]
    return "\n".join([*turns[:-1], *turns[-1:] * 4])


def _check_targets(options: CalibrateOptions) -> None:
    """What would fail after the work fails before it."""
    for flag, path in (("--out", options.out), ("--plot", options.plot)):
        if path is None:
            continue
        if not Path(path).parent.is_dir() or Path(path).is_dir():
            raise InputError(f"{flag} {path!r}: the folder does not exist, or this is one.")
    if options.plot is not None and find_spec("matplotlib") is None:
        raise MissingExtraError(missing("The picture", "matplotlib", "figures"))


@contextmanager
def _phases(progress: Progress) -> Iterator[Callable[[str, int, int | None], None]]:
    """One bar a phase of the work, on terminals."""
    with ExitStack() as stack:
        current: list[str] = []
        bars: list[Callable[[int, int], None]] = []

        def on_progress(what: str, done: int, whole: int | None) -> None:
            if current != [what]:
                stack.close()
                current[:] = [what]
                bars[:] = [stack.enter_context(progress.counting(what))]
            bars[0](done, whole or 0)

        yield on_progress
