"""The commands `rag-windows eval ...` and their options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic_core import to_jsonable_python
from rich.table import Column
from rich.text import Text

from rag_windows import cli
from rag_windows.cli import Group, LoadOptions, RayOptions, count, flag, option, spreading
from rag_windows.errors import require
from rag_windows.visible_text import one_line

evaluation = typer.Typer(help="Compare methods on datasets and write a report.", cls=Group)
score = typer.Typer(help="Score a file of predictions.", cls=Group)
evaluation.add_typer(score, name="score")


def _running() -> Any:
    """The module that the commands call, once its packages are known to be installed."""
    names = ("pandas", "sacrebleu", "scipy", "spacy", "tabulate")
    require("rag-windows eval", *names, extra="eval")
    from rag_windows_eval.cli import running

    return running


def _several(text: str, least: int) -> Any:
    """An option that takes whole numbers with commas between them."""

    def parsed(value: str) -> list[int]:
        try:
            found = sorted({int(word) for word in value.split(",")})
        except ValueError:
            found = []
        if not found or found[0] < least:
            raise typer.BadParameter(
                f"{value!r} must be a list of whole numbers from {least} on, such as 5,10,20"
            )
        return found

    return option("N,...", text, parser=parsed)


Data = Annotated[str, option("FILE", "The dataset's data file.")]
Dataset = Annotated[str, option("NAME", "One of the ten datasets, such as doc2dial.")]
Methods = Annotated[
    str, option("NAME,...", "Methods to compare, such as sequential,ape:temperature=0.8.")
]
TopK = Annotated[Any, _several("Number of passages to read; several numbers are compared.", 1)]
Shots = Annotated[Any, _several("Number of demonstrations; several numbers are compared.", 0)]
Retriever = Annotated[
    Literal["bm25", "dense", "hybrid", "gold"],
    option(None, "How passages are found; gold takes the dataset's right ones."),
]
Embedder = Annotated[
    str | None,
    option(
        "MODEL",
        "Embedding model that ranks ChatRAG-Bench's passages anew. Default: the order of the data.",
    ),
]
Predictions = Annotated[Path, option("FILE", "File of predictions.")]


@dataclass(frozen=True, slots=True)
class Asking(LoadOptions):
    """Options of every evaluation that asks a model; each field is the option of its name."""

    model: cli.Model = ""
    methods: Methods = "sequential,auto,ape"
    out: Annotated[
        Path | None,
        option(
            "DIR",
            "Folder of the run; the same command continues there. Default: a folder in runs/.",
        ),
    ] = None
    limit: Annotated[int | None, count("Ask only the first N questions.")] = None
    seed: Annotated[int, option("N", "Random seed.", min=0)] = 0
    max_new_tokens: Annotated[
        int | None, count("Largest number of tokens of an answer. Default: the dataset's.")
    ] = None
    system: cli.System = None
    # Windows are stored in memory only, so that no other run's windows count.
    cache_memory: Annotated[
        str, option("SIZE", 'Memory for encoded windows: "8GiB", or a share of RAM.')
    ] = "50%"
    fresh: Annotated[bool, flag("--fresh", "Remove the folder's old results first.")] = False
    json: cli.Json = False


_NO_OPTIONS = (
    *("method", "rag_temperature", "rag_scale"),
    *("cache_dir", "shared", "shared_wait", "shared_apart", "no_cache"),
)
"""Options of a model that evaluations take from --methods, or not at all."""


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def inscit(
    *,
    data: Data,
    corpus: Annotated[
        str | None,
        option(
            "FILE", "Passages to search, as JSONL or TSV. Default: the dataset's evidence passages."
        ),
    ] = None,
    retriever: Retriever = "bm25",
    embedder: Annotated[str | None, option("MODEL", "Embedding model of dense and hybrid.")] = None,
    top_k: TopK = "20",
    asking: Asking,
    over: RayOptions,
    evidence: Annotated[
        int, count("Number of passages that a prediction names as evidence, by attention weight.")
    ] = 1,
) -> None:
    """INSCIT: conversations over Wikipedia, each turn answered over retrieved passages.

    --data is the dataset's dev.json or test.json. Predictions are written in the dataset's format.
    """
    search = {"kind": retriever, "depth": max(top_k), "embedder": embedder}
    chosen = {"corpus": corpus, "evidence": evidence}
    _running().evaluate(asking, over, "inscit", data, top_k, search, **chosen)


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def chatrag(
    *,
    data: Data,
    dataset: Dataset,
    embedder: Embedder = None,
    top_k: TopK = "5",
    asking: Asking,
    over: RayOptions,
) -> None:
    """ChatRAG-Bench: ten conversational datasets whose passages come ranked with the question."""
    kind = "given" if embedder is None else "dense"
    search = {"kind": kind, "depth": max(top_k), "embedder": embedder}
    _running().evaluate(asking, over, "chatrag", data, top_k, search, dataset=dataset)


@evaluation.command()
@spreading(without=(*_NO_OPTIONS, "max_new_tokens", "max_window_tokens"))
def icl(
    *,
    task: Annotated[
        str, option("FILE", 'JSONL file with "text", "label" and, optionally, "split".')
    ],
    demos: Annotated[
        str | None, option("FILE", "Demonstrations, if the task's file holds none.")
    ] = None,
    shots: Shots = "32",
    windows: Annotated[
        int | None,
        count("Number of windows. Default: one for every eight demonstrations, at most eight."),
    ] = None,
    calibrate_with: Annotated[
        list[str] | None, option("TEXT", "A text without content, such as N/A; can be repeated.")
    ] = None,
    asking: Asking,
    over: RayOptions,
) -> None:
    """In-context learning: label texts by demonstrations that are read in windows."""
    asking = replace(asking, model=asking.model or "tiny-learner")
    chosen = {"demonstrations": demos, "windows": windows, "calibrate_with": calibrate_with or []}
    _running().evaluate(asking, over, "icl", task, shots, {}, seed=asking.seed, **chosen)


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def passages(
    *,
    data: Annotated[
        str,
        option(
            "FILE",
            "Questions with their passages: JSON lines or a list with passages or ctxs, or a file "
            "of HotpotQA, 2WikiMultihopQA, MuSiQue or SQuAD.",
        ),
    ],
    passages: Annotated[
        Any,
        _several(
            "Number of passages to read, the right ones among them; several numbers are compared. "
            "Default: all that a question brings.",
            1,
        ),
    ] = None,
    without_right: Annotated[
        bool,
        flag(
            "--without-right",
            "Leave out the right passages: who does not invent an answer says so, which is counted "
            "as not mentioned.",
        ),
    ] = False,
    asking: Asking,
    over: RayOptions,
) -> None:
    """Questions that bring their passages: which method answers them right, and cites right.

    The right passages stay, others are added up to the number asked for, and the places of all
    are shuffled by the seed. Where passages are not marked as right, citations are not scored.
    """
    chosen: dict[str, Any] = {"sizes": passages or [None], "seed": asking.seed}
    chosen["without_right"] = without_right
    _running().evaluate(asking, over, "passages", data, [None], {}, **chosen)


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def citations(
    *,
    data: Annotated[
        str, option("FILE", "Questions with their passages, as for rag-windows eval passages.")
    ],
    passages: Annotated[
        Any, _several("Number of passages to read; several numbers are compared.", 1)
    ] = None,
    without_right: Annotated[
        bool,
        flag("--without-right", "Leave out the right passages: who cites all the same is wrong."),
    ] = False,
    every_answer: Annotated[
        bool,
        flag(
            "--every-answer",
            "Judge the citations of every answer, not only of those that hold a right one word for "
            "word: for long answers.",
        ),
    ] = False,
    halves: Annotated[
        int, option("N", "Random halves of the passages to leave out; 0 for none.", min=0)
    ] = 8,
    asking: Asking,
    over: RayOptions,
) -> None:
    """How right citations are, by attention and by leaving passages out, and what they explain.

    Answers are asked once; then passages are left out: each one, the first ones of both rankings,
    and random halves. A method that can't leave a passage out is measured by attention only.
    """
    chosen: dict[str, Any] = {"sizes": passages or [None], "seed": asking.seed}
    chosen |= {"without_right": without_right, "every_answer": every_answer}
    options = {"halves": halves}
    run = _running().evaluate
    run(asking, over, "citations", data, [None], {}, citing_options=options, **chosen)


@dataclass(frozen=True, slots=True)
class SuiteOptions(Asking):
    """Options of a suite; each field is the option of its name."""

    methods: Annotated[
        str,
        option(
            "NAME,...",
            "Methods to compare, such as sequential,ape:temperature=0.8; all are those that "
            "rag-windows methods lists.",
        ),
    ] = "all"
    limit: Annotated[int | None, count("Ask N questions of each set.")] = None
    sets: Annotated[
        str | None,
        option(
            "NAME,...",
            "What is asked: inscit, chatrag or one of its sets such as chatrag/quac, passages or "
            "the name of one of its files such as passages/nq. Default: all.",
        ),
    ] = None
    inscit: Annotated[str | None, option("FILE", "INSCIT's dev.json or test.json.")] = None
    chatrag: Annotated[
        str | None, option("DIR", "Folder with ChatRAG-Bench as the Hub has it.")
    ] = None
    passages: Annotated[
        list[str] | None,
        option("FILE", "Questions with their passages, as for eval passages; can be repeated."),
    ] = None
    top_k: Annotated[
        int, count("Number of passages for questions of INSCIT and ChatRAG-Bench.")
    ] = 5
    embedder: Embedder = None


@evaluation.command()
@spreading(without=_NO_OPTIONS)
def suite(*, asking: SuiteOptions, over: RayOptions) -> None:
    """All evaluations with one model: one folder, one report, hours estimated at the start.

    INSCIT, ChatRAG-Bench's sets, and files of questions that bring their passages. Some questions
    of each set are asked first, to measure how long all will take and the first token with cold
    and warm windows.
    """
    _running()
    from rag_windows_eval.cli.suite import run_suite

    run_suite(asking, over)


@evaluation.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or of a suite.")],
    out: Annotated[
        Path | None, option("DIR", "Folder for the report. Default: that of the first run.")
    ] = None,
    data: Annotated[str | None, option("FILE", "The data file, if it was moved.")] = None,
    json: cli.Json = False,
) -> None:
    """Score runs again and write one report of them."""
    _running()
    from rag_windows_eval.cli.suite import report_again

    report_again(folders, out or folders[0], data, json_only=json)


@score.command("inscit")
def score_inscit(
    data: Data,
    predictions: Predictions,
    by_type: Annotated[
        bool, flag("--by-type", "Also show the scores for each type of response.")
    ] = False,
    json: cli.Json = False,
) -> None:
    """INSCIT's own metrics (evidence F1, sacreBLEU, response F1), and ChatRAG-Bench's F1."""
    from rag_windows_eval.inscit import score_inscit as scored

    _show(scored(Path(data), predictions, by_type=by_type), as_json=json)


@score.command("chatrag")
def score_chatrag(
    data: Data,
    dataset: Dataset,
    predictions: Predictions,
    answerable: Annotated[
        Path | None, option("FILE", "For QuAC: its list of answerable questions.")
    ] = None,
    json: cli.Json = False,
) -> None:
    """ChatRAG-Bench's metrics for a file with one answer per line."""
    from rag_windows_eval.chatrag import score_chatrag as scored

    _show({"": scored(Path(data), dataset, predictions, answerable)}, as_json=json)


def _show(scores: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    """Print scores in percent by type, which is "" for all, and how many answers they are of."""
    if as_json:
        # NaN is no JSON: a score of no question at all is null.
        cli.write_json(to_jsonable_python(scores.get("", scores), inf_nan_mode="null"))
        return
    names = list(next(iter(scores.values())))
    table = cli.plain_table("", *(Column(name, justify="right") for name in names))
    for kind, found in scores.items():
        figures = [str(value) if name == "n" else f"{value:.2f}" for name, value in found.items()]
        table.add_row(Text(one_line(kind)), *figures)
    cli.console().print(table)
