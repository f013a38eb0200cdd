"""The commands `rag-windows eval ...` and their options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Column
from rich.text import Text

from rag_windows.cli import options, render
from rag_windows.cli.errors import Group
from rag_windows.cli.models import ModelOptions
from rag_windows.cli.options import spreading
from rag_windows.errors import InputError, MissingExtraError, missing
from rag_windows.prompt.visible_text import one_line

_PACKAGES = ("jinja2", "matplotlib", "pandas", "sacrebleu", "scipy", "spacy", "tabulate")


class _Evaluation(Group):
    """Evaluation's commands: without their packages, only their help is there."""

    def invoke(self, ctx: Any) -> Any:
        """Name the extra where one of its packages can't be imported."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _PACKAGES:
                raise
            raise MissingExtraError(missing("rag-windows eval", package, "eval")) from error


evaluation = typer.Typer(
    help="Compare methods on datasets: quality with intervals, speed, and a report.",
    cls=_Evaluation,
)
score = typer.Typer(help="Score a finished file of predictions alone.", cls=Group)


def _option(metavar: str | None, help_: str, name: str | None = None, **more: Any) -> Any:
    names = () if name is None else (name,)
    return typer.Option(*names, metavar=metavar, help=help_, **more)


Data = Annotated[str, _option("FILE", "The dataset's own file.")]
Dataset = Annotated[str, _option("NAME", "Which of the ten, such as doc2dial.")]
Methods = Annotated[
    list[str],
    _option(
        "NAME,...", "To compare, such as sequential,ape:temperature=0.8; see rag-windows methods."
    ),
]
METHODS = ["sequential,pcw,ape"]
TopK = Annotated[list[str], _option("N,...", "Passages to read; several numbers are compared.")]
Style = Annotated[Literal["plain", "chatrag"], _option(None, "How a question is put to the model.")]
Speed = Annotated[int, _option("N", "Questions whose first token is timed, cold and warm.", min=0)]
Predictions = Annotated[Path, _option("FILE", "Answers that are there.")]


@dataclass(frozen=True, slots=True)
class Asking(ModelOptions):
    """What every evaluation that asks a model is told; each field is the option of its name."""

    out: Annotated[
        Path | None, _option("DIR", "Of the run, where the same command goes on; below runs/.")
    ] = None
    limit: Annotated[int | None, _option("N", "Only the first N questions.", min=1)] = None
    seed: Annotated[int, _option("N", "Of everything that is drawn.", min=0)] = 0
    max_new_tokens: Annotated[
        int | None, _option("N", "Of an answer. Default: the dataset's.", min=1)
    ] = None
    system: Annotated[
        str | None, _option("TEXT", 'Before the passages; "" for none. Default: the dataset\'s.')
    ] = None
    rag_temperature: Annotated[float | None, _option("T", "Of methods that have one.")] = None
    rag_scale: Annotated[float | None, _option("S", "Of methods that have one.")] = None
    link_tokens: options.LinkTokens = None
    # Windows are kept in memory alone, so that no other run's windows count.
    cache_memory: Annotated[
        str, _option("SIZE", 'For encoded windows, such as "8GiB" or a share of what is free.')
    ] = "50%"
    fresh: Annotated[bool, _option(None, "Remove what the folder holds.", name="--fresh")] = False
    json: options.Json = False

    def ask(self, kind: str, data: str | None, chosen: dict[str, Any], **more: Any) -> None:
        """Run an evaluation; see `running.evaluate`."""
        from rag_windows.cli.evaluation.running import evaluate

        evaluate(self, kind, data, chosen, **more)


_NO_OPTIONS = ("model", "method", "cache_dir", "no_cache")
"""Of a model that commands have otherwise, or not at all."""


def numbers(given: Sequence[str], option: str = "--top-k", least: int = 1) -> tuple[int, ...]:
    """Whole numbers such as "5,10,20", each once and in rising order."""
    value = ",".join(given)
    words = [word.strip() for word in value.split(",")]
    right = all(word.isascii() and word.isdecimal() and int(word) >= least for word in words)
    if not right or len(set(map(int, words))) < len(words):
        raise InputError(
            f"{option} {value!r} is no list of different whole numbers from {least} on, such as "
            "5,10,20."
        )
    return tuple(sorted(map(int, words)))


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def inscit(
    *,
    data: Data,
    corpus: Annotated[
        str | None,
        _option(
            "FILE",
            "Passages to search, as JSONL with id, title, text. Default: the data's evidence.",
        ),
    ] = None,
    pool: Annotated[Literal["evidence"] | None, _option(None, "The same as no --corpus.")] = None,
    model: options.Model = "tiny-reader",
    methods: Methods = METHODS,
    retriever: Annotated[
        Literal["bm25", "dense", "hybrid", "gold"],
        _option(None, "How passages are found; gold reads the right ones alone."),
    ] = "bm25",
    embedder: Annotated[
        str | None, _option("MODEL", "For dense and hybrid: of sentence-transformers.")
    ] = None,
    top_k: TopK = ["20"],  # noqa: B006 - typer copies it
    asking: Asking,
    style: Style = "plain",
    evidence: Annotated[
        int, _option("N", "Passages that a prediction names, by attention.", min=1)
    ] = 1,
    speed: Speed = 3,
) -> None:
    """INSCIT: conversations over Wikipedia; each turn is answered over retrieved passages.

    --data is the dataset's own dev.json or test.json. Predictions are written in its own format.
    """
    if corpus is not None and pool is not None:
        raise InputError("--corpus and --pool exclude each other; leave one of them out.")
    chosen = {"corpus": corpus, "style": style, "evidence": evidence}
    run = {"model": model, "methods": methods, "depths": numbers(top_k), "speed": speed}
    asking.ask("inscit", data, chosen, **run, retriever=retriever, embedder=embedder)


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def chatrag(
    *,
    data: Data,
    dataset: Dataset,
    model: options.Model = "tiny-reader",
    methods: Methods = METHODS,
    top_k: TopK = ["5"],  # noqa: B006 - typer copies it
    asking: Asking,
    style: Style = "chatrag",
    speed: Speed = 3,
) -> None:
    """ChatRAG-Bench: ten conversational datasets that bring their passages in ranked order."""
    chosen = {"dataset": dataset, "style": style}
    run = {"model": model, "methods": methods, "depths": numbers(top_k), "speed": speed}
    asking.ask("chatrag", data, chosen, **run)


@evaluation.command()
@spreading(without=(*_NO_OPTIONS, "max_new_tokens", "max_window_tokens"))
def icl(
    *,
    task: Annotated[str, _option("FILE", 'JSONL with "text", "label", and perhaps "split".')],
    demos: Annotated[
        str | None, _option("FILE", "What is shown, if the task's file lacks it.")
    ] = None,
    model: options.Model = "tiny-learner",
    methods: Methods = METHODS,
    shots: Annotated[
        list[str], _option("N,...", "Demonstrations to show; several numbers are compared.")
    ] = ["32"],  # noqa: B006 - typer copies it
    windows: Annotated[
        int | None,
        _option("N", "Of demonstrations. Default: one for every eight, up to eight.", min=1),
    ] = None,
    window_tokens: Annotated[
        int | None, _option("N", "Or how long a window is at most.", min=1)
    ] = None,
    normalize: Annotated[
        Literal["sum", "mean"], _option(None, "How a label's tokens are counted together.")
    ] = "sum",
    calibrate_with: Annotated[
        list[str] | None, _option("TEXT", "Such as N/A: its label probabilities divide the others.")
    ] = None,
    template: Annotated[
        str | None, _option("FORM", 'Of a demonstration. Default: "{text}: {label}".')
    ] = None,
    label: Annotated[
        list[str] | None,
        _option("LABEL", "To choose from, repeated. Default: the demonstrations'."),
    ] = None,
    asking: Asking,
) -> None:
    """In-context learning: texts to label, behind demonstrations in windows."""
    chosen = {
        "demonstrations": demos,
        "seed": asking.seed,
        "windows": windows,
        "window_tokens": window_tokens,
        "normalize": normalize,
        "calibrate_with": calibrate_with or [],
        "template": template,
        "labels": label or None,
    }
    depths = numbers(shots, "--shots", least=0)
    asking.ask("icl", task, chosen, model=model, methods=methods, depths=depths)


@evaluation.command()
@spreading(without=(*_NO_OPTIONS, "limit"))
def long(
    *,
    haystack: Annotated[
        str | None, _option("DIR", "Texts to hide invented facts in. Default: the samples.")
    ] = None,
    passages: Annotated[
        list[str], _option("N,...", "How many there are, the needle's included.")
    ] = ["1,4,16,64"],  # noqa: B006 - typer copies it
    positions: Annotated[
        list[str], _option("X,...", "Of the needle, from 0 (first) to 1 (last).")
    ] = ["0,0.5,1"],  # noqa: B006 - typer copies it
    questions: Annotated[int | None, _option("N", "In each cell. Default: 10.", min=1)] = None,
    passage_words: options.PassageWords = 100,
    model: options.Model = "tiny-reader",
    methods: Methods = METHODS,
    asking: Asking,
    speed: Speed = 8,
) -> None:
    """A needle among more and more passages, first, in the middle and last."""
    words = ",".join(positions).split(",")
    try:
        depths = sorted({float(word) for word in words})
    except ValueError:
        depths = []
    if len(depths) < len(words) or not all(0 <= one <= 1 for one in depths):
        given = ",".join(words)
        raise InputError(f"--positions {given!r} is no list of numbers from 0 to 1, such as 0,0.5.")
    chosen = {
        "haystack": haystack,
        "sizes": numbers(passages, "--passages"),
        "depths": depths,
        "questions": questions,
        "seed": asking.seed,
        "passage_words": passage_words,
    }
    run = {"model": model, "methods": methods, "depths": (None,), "speed": speed}
    asking.ask("long", None, chosen, **run)


@evaluation.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Folders that runs wrote.")
    ],
    out: Annotated[
        Path | None, _option("DIR", "Of the report. Default: that of the first run.")
    ] = None,
    data: Annotated[str | None, _option("FILE", "The data, if they lie elsewhere now.")] = None,
    json: options.Json = False,
) -> None:
    """Score runs again and write their report, several runs in one."""
    from rag_windows.cli.evaluation.running import report_again

    report_again(folders, out or folders[0], data, json_only=json)


@score.command("inscit")
def score_inscit(
    data: Data,
    predictions: Predictions,
    by_type: Annotated[bool, _option(None, "For each type of response.", name="--by-type")] = False,
    json: options.Json = False,
) -> None:
    """INSCIT's own metrics (evidence F1, sacreBLEU, response F1), and ChatRAG-Bench's F1."""
    from rag_windows.evaluation.inscit import score_inscit as scored

    found = scored(Path(data), predictions, by_type=by_type)
    _show(found if by_type else found[""], as_json=json)


@score.command("chatrag")
def score_chatrag(
    data: Data,
    dataset: Dataset,
    predictions: Predictions,
    answerable: Annotated[
        Path | None, _option("FILE", "QuAC: the list of what can be answered.")
    ] = None,
    json: options.Json = False,
) -> None:
    """ChatRAG-Bench's metrics of a file with an answer a line."""
    from rag_windows.evaluation.chatrag import score_chatrag as scored

    _show(scored(Path(data), dataset, predictions, answerable), as_json=json)


evaluation.add_typer(score, name="score")


def _show(scores: Mapping[str, Any], *, as_json: bool) -> None:
    """Print scores in percent, and how many answers they are of; of several types, a row each."""
    if as_json:
        render.write_json(_plain(scores))
        return
    rows = scores if isinstance(next(iter(scores.values())), Mapping) else {"": scores}
    names = list(next(iter(rows.values())))
    table = render.plain_table("", *(Column(name, justify="right") for name in names))
    for kind, found in rows.items():
        figures = [str(value) if name == "n" else f"{value:.2f}" for name, value in found.items()]
        table.add_row(Text(one_line(kind)), *figures)
    render.console().print(table)


def _plain(value: Any) -> Any:
    # NaN is no JSON: a score of no question at all is null.
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return None if math.isnan(value) else value
