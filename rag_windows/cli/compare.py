"""The command `compare`: which method to take, for a model and documents of one's own."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Column

from rag_windows.cli import options, render
from rag_windows.cli.corpus import SearchOptions, open_corpus
from rag_windows.cli.model_loading import LoadOptions, instruction, loaded_model
from rag_windows.cli.options import count, option
from rag_windows.errors import InputError, require
from rag_windows.methods import resolve
from rag_windows.methods.registry import names_in, spelled
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows.calibration import Example, Profile
    from rag_windows.calibration.profile import Figure, Setting


@options.spreading(without=("method", "profile", "rag_temperature", "rag_scale"))
def compare(
    *,
    questions: Annotated[
        str | None,
        option(
            "FILE",
            'JSONL file with "question" and, optionally, "answer" and "passages". '
            "Default: the sample questions.",
        ),
    ] = None,
    search: SearchOptions,
    methods: Annotated[
        str | None,
        option(
            "NAMES",
            "Methods to compare with one prompt, with commas between them; rag-windows methods "
            "lists them. Default: those worth asking.",
        ),
    ] = None,
    grid: Annotated[
        str | None, option("NAME", "Try different numbers of this method as well, such as ape.")
    ] = None,
    out: Annotated[
        str | None, option("FILE", "Write the profile to this file, for --profile.")
    ] = None,
    plot: Annotated[
        str | None, option("FILE", "Draw the settings of --grid as a picture into this PNG file.")
    ] = None,
    by: Annotated[
        Literal["auto", "labels", "agreement"],
        option(
            None,
            "Criterion: whether answers hold the right one (labels), or agree with one prompt "
            "(agreement). auto takes labels where every question has an answer.",
        ),
    ] = "auto",
    limit: Annotated[int, count("Use at most the first N questions.")] = 64,
    max_new_tokens: options.MaxNewTokens = 32,
    system: options.Instruction = None,
    seed: Annotated[int, option("N", "Random seed of folds and confidence intervals.", min=0)] = 0,
    model: LoadOptions,
    json: options.Json = False,
) -> None:
    """Compare methods with one prompt on your model and questions, and say which one to take.

    Give the same instruction (--system) and passage lengths as for the questions later.
    """
    # What would fail after the work fails before it.
    model.check()
    for flag, path in (("--out", out), ("--plot", plot)):
        if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
            raise InputError(
                f"{flag} {path!r} can't be written: its folder does not exist, or it is "
                "a folder itself. Name a file in an existing folder."
            )
    if plot is not None:
        require("The picture", "matplotlib", extra="figures")
    named = None if methods is None else names_in(methods)
    for one in (*(named or ()), *([grid] if grid else ())):
        resolve(one)
    given = _examples(search, model, questions, limit)
    _check_count(given, by)
    from rag_windows.calibration.compare import FEWEST

    try:
        with loaded_model(model) as lm, render.progress("Comparing") as counted:
            profile = lm.compare(
                given,
                named,
                grid=grid,
                by=None if by == "auto" else by,
                prefix=instruction(system, model.name, lm),
                max_new_tokens=max_new_tokens,
                seed=seed,
                on_progress=lambda _, done, whole: counted(done, whole or 0),
            )
    except KeyboardInterrupt:
        render.tell(
            f"Stopped before there was a profile, for which every method has to answer {FEWEST} "
            "questions. Nothing was written."
        )
        raise typer.Abort from None
    if out is not None:
        profile.save(out)
    if plot is not None:
        profile.plot(plot)
    if json:
        render.write_json(json_format.loads(profile.to_json()))
    else:
        _show(profile)
    render.show_notes(profile.left_out, as_json=json)
    if out is not None and not json:
        render.show(f"Wrote {out}. Use it: --profile {out}", "dim")
    if profile.interrupted:
        where = "" if out is None else f" The profile is in {out}."
        render.tell(f"Stopped. {profile.examples} questions were asked.{where}")
        raise typer.Abort


def _examples(
    search: SearchOptions, model: LoadOptions, path: str | None, limit: int
) -> list[Example]:
    """The questions, with retrieved passages where they bring none."""
    from rag_windows.calibration import Example, read_examples

    if path is not None:
        examples = read_examples(path)
    elif search.docs or search.index is not None:
        named = "--docs" if search.docs else "--index"
        raise InputError(
            f"A comparison needs questions about the documents of {named}. Give them with "
            "--questions."
        )
    else:
        text = (samples_path() / "questions.jsonl").read_text(encoding="utf-8")
        rows = [json_format.loads(line) for line in text.splitlines()]
        # Every second one, so that all kinds of questions among them are taken.
        examples = [Example(row["question"], (), row["answer"]) for row in rows[::2]]
    examples = examples[:limit]
    bare = [place for place, one in enumerate(examples) if not one.passages]
    if not bare:
        return examples
    if path is not None and not search.docs and search.index is None:
        raise InputError(
            f"Question {bare[0] + 1} of {path!r} has no passages. Give it passages, or name "
            "documents to retrieve them from with --docs."
        )
    retriever = open_corpus(search, model)
    for place in bare:
        query = examples[place].query
        if not isinstance(query, str):
            raise InputError(
                'An example that is a conversation needs passages of its own. Give it "passages".'
            )
        found = retriever.retrieve(query, search.top_k)
        examples[place] = replace(examples[place], passages=found)
    return examples


def _check_count(given: Sequence[Example], by: str) -> None:
    """What a comparison refuses, before a model is loaded for it."""
    from rag_windows.calibration.compare import FEWEST

    labelled = [one for one in given if one.answer is not None]
    if len(usable := labelled if by == "labels" else given) < FEWEST:
        what = "questions with an answer" if by == "labels" else "questions"
        raise InputError(
            f"A comparison needs at least {FEWEST} {what}, but there are {len(usable)}. Give more "
            "with --questions: a few dozen make the choice trustworthy."
        )


_WIDEST = 1000
"""Columns of the table in a pipe at most, which has no edge."""


def _show(profile: Profile) -> None:
    """Print the best settings and one prompt as a table, and the verdict."""
    ranked = profile.ranked()
    shown = [*ranked[:10], *(one for one in ranked[10:] if one.method == profile.base)]
    names = list(profile.setting(profile.base).figures)
    rows = [["method", *names, "cold", "warm", "again", ""]]
    for one in shown:
        figures = [_mean(one, name) for name in names]
        rows.append([spelled(one.method), *figures, *_costs(one), _mark(profile, one)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    styles = ["bold" if one.method == profile.method else None for one in shown]
    out = render.console(piped=_WIDEST)
    if sum(widths) + 2 * len(widths) <= out.width:
        method, *heads, mark = rows[0]
        columns = [Column(head, justify="right") for head in heads]
        table = render.plain_table(method, *columns, mark)
        for row, style in zip(rows[1:], styles, strict=True):
            table.add_row(*row, style=style)
        out.print(table)
    else:
        # A name may be copied from here, so that it is never split.
        render.show(_line(rows[0][1:-1], widths[1:-1]), "bold")
        for (name, *figures, mark), style in zip(rows[1:], styles, strict=True):
            render.show(f"{name}  ({mark})" if mark else name, "bold")
            render.show(_line(figures, widths[1:-1]), style)
    render.show(
        f"{profile.examples} questions, {len(ranked)} methods; 95% confidence intervals in "
        "brackets. The first token comes after so many seconds when nothing is encoded (cold; "
        "empty where the passages were in the cache), and when all passages were encoded for other "
        "questions (warm); then so many of their tokens are encoded again.",
        "dim",
    )
    render.show(profile.verdict, "bold")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(map(str.rjust, cells, widths))


def _mean(setting: Setting, name: Figure) -> str:
    from rag_windows.calibration.profile import formatted

    mean = setting.figures[name]
    low, value, high = (formatted(name, one) for one in (mean.low, mean.value, mean.high))
    return f"{value}{'%' if name == 'contains' else ''} ({low} to {high})"


def _costs(setting: Setting) -> list[str]:
    cost = setting.cost
    seconds = ["" if one is None else f"{one:.3g} s" for one in (cost.cold_s, cost.warm_s)]
    return [*seconds, "" if cost.tokens is None else f"{cost.tokens:,}"]


def _mark(profile: Profile, setting: Setting) -> str:
    marks = ("take this", profile.method), ("the baseline", profile.base)
    return ", ".join(text for text, method in marks if method == setting.method)
