"""The command `calibrate`: choosing a method's numbers for a model and its documents."""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.table import Column
from rich.text import Text

from rag_windows.cli import options, render
from rag_windows.cli.options import ModelOptions, SearchOptions, count, option
from rag_windows.errors import InputError, require
from rag_windows.methods import resolve
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows.calibration import Example, Profile


@options.spreading(without=("method", "profile", "rag_temperature", "rag_scale"))
def calibrate(
    *,
    examples: Annotated[
        str | None,
        option(
            "FILE",
            'JSONL file with "query" and, optionally, "passages" and "answer". '
            "Default: the sample questions.",
        ),
    ] = None,
    search: SearchOptions,
    method: Annotated[
        str, option("NAME", "Method whose numbers to choose; rag-windows methods lists them.")
    ] = "ape",
    out: Annotated[
        str | None, option("FILE", "Write the profile to this file, for --profile.")
    ] = None,
    plot: Annotated[
        str | None, option("FILE", "Draw all settings as a picture into this PNG file.")
    ] = None,
    by: Annotated[
        Literal["auto", "labels", "agreement"],
        option(
            None,
            "Criterion: agreement with the right answers (labels) or with sequential "
            "reading (agreement). auto takes labels where every example has an answer.",
        ),
    ] = "auto",
    limit: Annotated[int, count("Use at most the first N examples.")] = 64,
    max_new_tokens: options.MaxNewTokens = 32,
    system: options.Instruction = None,
    seed: Annotated[int, option("N", "Random seed of folds and confidence intervals.", min=0)] = 0,
    model: ModelOptions,
    json: options.Json = False,
) -> None:
    """Choose a method's numbers for a model and documents, and compare them with the default.

    Give the same instruction (--system) and passage lengths as for the questions later.
    """
    # What would fail after the work fails before it.
    for flag, path in (("--out", out), ("--plot", plot)):
        if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
            raise InputError(
                f"{flag} {path!r} can't be written: its folder does not exist, or it is "
                "a folder itself. Name a file in an existing folder."
            )
    if plot is not None:
        require("The picture", "matplotlib", extra="figures")
    if not resolve(method).windowed:
        raise InputError(
            f"--method {method} reads no windows, so it has no numbers to choose. Name one that "
            "does, such as ape."
        )
    given = _examples(search, model.model, examples, limit)
    with options.loaded_model(model) as lm, render.progress("Calibrating") as counted:
        profile = lm.calibrate(
            given,
            method=method,
            by=None if by == "auto" else by,
            prefix=options.instruction(system, model.name),
            max_new_tokens=max_new_tokens,
            seed=seed,
            on_progress=lambda _, done, whole: counted(done, whole or 0),
        )
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


def _examples(
    search: SearchOptions, model: str | None, path: str | None, limit: int
) -> list[Example]:
    """The examples, with retrieved passages where they bring none."""
    from rag_windows.calibration import Example, read_examples

    if path is not None:
        examples = read_examples(path)
    elif search.docs:
        raise InputError(
            "Calibration needs questions about the documents of --docs. Give them with --examples."
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
    if path is not None and not search.docs:
        raise InputError(
            f"Example {bare[0] + 1} of {path!r} has no passages. Give it passages, or name "
            "documents to retrieve them from with --docs."
        )
    retriever = options.open_corpus(search, model)
    for place in bare:
        query = examples[place].query
        if not isinstance(query, str):
            raise InputError(
                'An example that is a conversation needs passages of its own. Give it "passages".'
            )
        found = retriever.retrieve(query, search.top_k)
        examples[place] = replace(examples[place], passages=found)
    return examples


def _show(profile: Profile) -> None:
    """Print the best settings and the default as a table, and the verdict."""
    from rag_windows.calibration.profile import label

    ranked, default = profile.ranked(), profile.setting(profile.default)
    names = list(default.figures)
    figures = [Column(name, justify="right", no_wrap=True) for name in names]
    rank, setting = Column(justify="right", style="dim"), Column("setting", no_wrap=True)
    table = render.plain_table(rank, setting, *figures, "")
    for place, one in enumerate(ranked, start=1):
        if place > 10 and one != default:
            continue
        named = (("chosen", profile.method), ("default", profile.default))
        marks = [mark for mark, method in named if one.method == method]
        means = [one.figures[name] for name in names]
        cells = [f"{mean.value:.3g} ({mean.low:.3g} to {mean.high:.3g})" for mean in means]
        text = Text(label(one.method), "bold" if "chosen" in marks else "")
        table.add_row(str(place), text, *cells, ", ".join(marks))
    render.console().print(table)
    counts = f"{profile.examples} examples, {len(ranked)} settings"
    render.show(f"{counts}; 95% confidence intervals in brackets.", "dim")
    render.show(profile.verdict, "bold")
