"""The commands `rag-windows eval ...` and their options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic_core import to_jsonable_python
from rich.table import Column
from rich.text import Text

from rag_windows.cli import options, render
from rag_windows.cli.options import ModelOptions, count, flag, option, spreading
from rag_windows.cli.render import Group
from rag_windows.prompt.visible_text import one_line

evaluation = typer.Typer(help="Compare methods on datasets, with a report.", cls=Group)
score = typer.Typer(help="Score a finished file of predictions alone.", cls=Group)
evaluation.add_typer(score, name="score")


def _running() -> Any:
    """What the commands call; whether its packages are installed is asked first."""
    from rag_windows.evaluation.inscit import check_packages

    check_packages("matplotlib", "pandas", "sacrebleu", "scipy", "spacy", "tabulate")
    from rag_windows.cli.evaluation import running

    return running


def _several(
    text: str,
    least: int,
    most: float = math.inf,
    kind: Callable[[str], float] = int,
    wanted: str = "whole numbers from {} on, such as 5,10,20",
) -> Any:
    """An option that takes numbers with commas between them."""

    def parsed(value: str) -> list[float]:
        try:
            found: list[float] = sorted({kind(word) for word in value.split(",")})
        except ValueError:
            found = []
        if not found or not all(least <= one <= most for one in found):
            raise typer.BadParameter(f"{value!r} is no list of {wanted.format(least)}")
        return found

    return option("N,...", text, parser=parsed)


Data = Annotated[str, option("FILE", "The dataset's own file.")]
Dataset = Annotated[str, option("NAME", "Which of the ten, such as doc2dial.")]
Methods = Annotated[str, option("NAME,...", "To compare, such as sequential,ape:temperature=0.8.")]
TopK = Annotated[Any, _several("Passages to read; several are compared.", 1)]
Shots = Annotated[Any, _several("Demonstrations; several are compared.", 0)]
Sizes = Annotated[Any, _several("How many, the needle's included.", 1)]
_PLACES = "numbers from 0 to 1, such as 0,0.5"
Places = Annotated[Any, _several("Of the needle, 0 (first) to 1 (last).", 0, 1, float, _PLACES)]
Style = Annotated[Literal["plain", "chatrag"], option(None, "How a question is put to the model.")]
Retriever = Annotated[
    Literal["bm25", "dense", "hybrid", "gold"],
    option(None, "How passages are found; gold reads the right ones alone."),
]
Predictions = Annotated[Path, option("FILE", "Answers that are there.")]


@dataclass(frozen=True, slots=True)
class Asking(ModelOptions):
    """What every evaluation that asks a model is told; each field is the option of its name."""

    model: options.Model = ""
    methods: Methods = "sequential,pcw,ape"
    out: Annotated[Path | None, option("DIR", "Where the same command goes on.")] = None
    limit: Annotated[int | None, count("Only the first N questions.")] = None
    seed: Annotated[int, option("N", "Of everything that is drawn.", min=0)] = 0
    max_new_tokens: Annotated[int | None, count("Of an answer. Default: the dataset's.")] = None
    system: options.System = None
    # Windows are kept in memory alone, so that no other run's windows count.
    cache_memory: Annotated[str, option("SIZE", 'For windows: "8GiB", or a share of RAM.')] = "50%"
    fresh: Annotated[bool, flag("--fresh", "Remove what the folder holds.")] = False
    json: options.Json = False


_NO_OPTIONS = ("method", "rag_temperature", "rag_scale", "cache_dir", "no_cache")
"""Of a model that evaluations take from --methods, or not at all."""


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def inscit(
    *,
    data: Data,
    corpus: Annotated[str | None, option("FILE", "JSONL or TSV. Default: the evidence.")] = None,
    retriever: Retriever = "bm25",
    embedder: Annotated[str | None, option("MODEL", "For dense and hybrid.")] = None,
    top_k: TopK = "20",
    asking: Asking,
    style: Style = "plain",
    evidence: Annotated[int, count("Passages that a prediction names, by attention.")] = 1,
) -> None:
    """INSCIT: conversations over Wikipedia; each turn is answered over retrieved passages.

    --data is the dataset's own dev.json or test.json. Predictions are written in its own format.
    """
    search = {"kind": retriever, "depth": max(top_k), "embedder": embedder}
    chosen = {"corpus": corpus, "style": style, "evidence": evidence}
    _running().evaluate(asking, "inscit", data, top_k, search, **chosen)


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def chatrag(
    *, data: Data, dataset: Dataset, top_k: TopK = "5", asking: Asking, style: Style = "chatrag"
) -> None:
    """ChatRAG-Bench: ten conversational datasets that bring their passages in ranked order."""
    search = {"depth": max(top_k)}
    _running().evaluate(asking, "chatrag", data, top_k, search, dataset=dataset, style=style)


@evaluation.command()
@spreading(without=(*_NO_OPTIONS, "max_new_tokens", "max_window_tokens"))
def icl(
    *,
    task: Annotated[str, option("FILE", 'JSONL with "text", "label", and perhaps "split".')],
    demos: Annotated[str | None, option("FILE", "What is shown, if the task's lacks it.")] = None,
    shots: Shots = "32",
    windows: Annotated[int | None, count("Default: one for every eight, up to eight.")] = None,
    calibrate_with: Annotated[list[str] | None, option("TEXT", "Such as N/A; repeated.")] = None,
    asking: Asking,
) -> None:
    """In-context learning: texts to label, behind demonstrations in windows."""
    asking = replace(asking, model=asking.model or "tiny-learner")
    chosen = {"demonstrations": demos, "windows": windows, "calibrate_with": calibrate_with or []}
    _running().evaluate(asking, "icl", task, shots, {}, seed=asking.seed, **chosen)


@evaluation.command()
@spreading(without=(*_NO_OPTIONS, "limit"))
def long(
    *,
    haystack: Annotated[str | None, option("DIR", "Texts. Default: the samples.")] = None,
    passages: Sizes = "1,4,16,64",
    positions: Places = "0,0.5,1",
    questions: Annotated[int | None, count("In each cell. Default: 10.")] = None,
    asking: Asking,
) -> None:
    """A needle among more and more passages, first, in the middle and last."""
    chosen = {"haystack": haystack, "sizes": passages, "depths": positions, "questions": questions}
    _running().evaluate(asking, "long", None, [None], {}, seed=asking.seed, **chosen)


@evaluation.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that runs wrote.")],
    out: Annotated[Path | None, option("DIR", "Default: that of the first run.")] = None,
    data: Annotated[str | None, option("FILE", "The data, if they lie elsewhere now.")] = None,
    json: options.Json = False,
) -> None:
    """Score runs again and write their report, several runs in one."""
    _running().report_again(folders, out or folders[0], data, json_alone=json)


@score.command("inscit")
def score_inscit(
    data: Data,
    predictions: Predictions,
    by_type: Annotated[bool, flag("--by-type", "For each type of response.")] = False,
    json: options.Json = False,
) -> None:
    """INSCIT's own metrics (evidence F1, sacreBLEU, response F1), and ChatRAG-Bench's F1."""
    from rag_windows.evaluation.inscit import score_inscit as scored

    _show(scored(Path(data), predictions, by_type=by_type), as_json=json)


@score.command("chatrag")
def score_chatrag(
    data: Data,
    dataset: Dataset,
    predictions: Predictions,
    answerable: Annotated[Path | None, option("FILE", "QuAC: what can be answered.")] = None,
    json: options.Json = False,
) -> None:
    """ChatRAG-Bench's metrics of a file with an answer a line."""
    from rag_windows.evaluation.chatrag import score_chatrag as scored

    _show({"": scored(Path(data), dataset, predictions, answerable)}, as_json=json)


def _show(scores: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    """Print scores in percent by type, which is "" for all, and how many answers they are of."""
    if as_json:
        # NaN is no JSON: a score of no question at all is null.
        render.write_json(to_jsonable_python(scores.get("", scores), inf_nan_mode="null"))
        return
    names = list(next(iter(scores.values())))
    table = render.plain_table("", *(Column(name, justify="right") for name in names))
    for kind, found in scores.items():
        figures = [str(value) if name == "n" else f"{value:.2f}" for name, value in found.items()]
        table.add_row(Text(one_line(kind)), *figures)
    render.console().print(table)
