"""The commands `rag-windows eval ...` and their options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from rag_windows.cli import options, render
from rag_windows.cli.errors import Group
from rag_windows.cli.models import ModelOptions
from rag_windows.cli.options import spreading
from rag_windows.errors import InputError
from rag_windows.prompt.visible_text import one_line

if TYPE_CHECKING:
    from rag_windows.cli.evaluation.source import Source

evaluation = typer.Typer(
    help="Compare methods on datasets: quality with intervals, speed, and a report.", cls=Group
)
score = typer.Typer(help="Score a finished file of predictions alone.", cls=Group)


def _option(name: str, metavar: str | None, help_: str, **more: Any) -> Any:
    """An option that shows no default but what its help says."""
    return typer.Option(name, metavar=metavar, help=help_, show_default=False, **more)


def numbers(given: Sequence[str], option: str = "--top-k", least: int = 1) -> tuple[int, ...]:
    """Whole numbers such as "5,10,20", each once and in rising order.

    Args:
        given: what stands behind the option, each time it is given.
        option: its name, for errors.
        least: the smallest number that makes sense.

    Raises:
        InputError: anything else.
    """
    value = ",".join(given)
    words = [word.strip() for word in value.split(",")]
    if not all(word.isascii() and word.isdecimal() and int(word) >= least for word in words):
        raise InputError(
            f"{option} {value!r} is no list of whole numbers from {least} on, such as 5,10,20."
        )
    found = [int(word) for word in words]
    if len(set(found)) < len(found):
        raise InputError(f"{option} {value!r} names a number twice.")
    return tuple(sorted(found))


Data = Annotated[Path, _option("--data", "FILE", "The dataset's own file.")]
Dataset = Annotated[
    str,
    _option("--dataset", "NAME", "Which of the ten the file is of, such as doc2dial or inscit."),
]
Methods = Annotated[
    list[str],
    typer.Option(
        "--methods",
        metavar="NAME,...",
        help="What to compare, such as sequential,ape:temperature=0.8,deep-thinking+ape; see "
        "rag-windows methods.",
    ),
]
METHODS = ["sequential,pcw,ape"]
TopK = Annotated[
    list[str],
    typer.Option(
        "--top-k", metavar="N,...", help="Passages to read; several numbers are compared."
    ),
]
Style = Annotated[
    Literal["plain", "chatrag"],
    typer.Option("--style", help="How a question is put to the model."),
]
Speed = Annotated[
    int,
    typer.Option(
        "--speed",
        min=0,
        metavar="N",
        help="Questions on which the first token is timed, cold and warm, in alternating rounds.",
    ),
]
Predictions = Annotated[Path, _option("--predictions", "FILE", "Answers that are there.")]


@dataclass(frozen=True, slots=True)
class Asking:
    """What every evaluation that asks a model is told; each field is the option of its name."""

    out: Annotated[
        Path | None,
        _option(
            "--out",
            "DIR",
            "Folder of the run; the same command goes on where it stopped. Default: a folder below "
            "runs/, named by the settings.",
        ),
    ] = None
    limit: Annotated[int | None, _option("--limit", "N", "Only the first N questions.", min=1)] = (
        None
    )
    seed: Annotated[
        int, typer.Option("--seed", min=0, metavar="N", help="Of everything that is drawn.")
    ] = 0
    max_new_tokens: Annotated[
        int | None,
        _option(
            "--max-new-tokens",
            "N",
            "Length of an answer at most. Default: the dataset's.",
            min=1,
        ),
    ] = None
    system: Annotated[
        str | None,
        _option(
            "--system",
            "TEXT",
            'Instruction before the passages; "" for none. Default: the dataset\'s.',
        ),
    ] = None
    rag_temperature: Annotated[
        float | None,
        _option("--rag-temperature", "T", "APE's temperature, for each method that has one."),
    ] = None
    rag_scale: Annotated[
        float | None, _option("--rag-scale", "S", "APE's scale, for each method that has one.")
    ] = None
    link_tokens: options.LinkTokens = None
    profile: Annotated[
        str | None,
        _option(
            "--profile",
            "FILE",
            "What rag-windows calibrate found: the numbers of the method of that name.",
        ),
    ] = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    max_window_tokens: options.MaxWindowTokens = None
    cache_memory: Annotated[
        str,
        typer.Option(
            "--cache-memory",
            metavar="SIZE",
            help='Memory for encoded windows, such as "8GiB" or a share of what is free. Nothing '
            "is kept on disk.",
        ),
    ] = "50%"
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Throw away what the folder holds and begin anew.")
    ] = False
    json: options.Json = False
    verbose: options.Verbose = False

    def ask(
        self,
        source: Source,
        search: Mapping[str, Any],
        model: str,
        methods: Sequence[str],
        depths: tuple[int | None, ...],
        speed: int = 0,
    ) -> None:
        """Run an evaluation.

        Args:
            source: the data.
            search: how passages are found; arguments of `Ranker`.
            model: its name or folder.
            methods: as often as --methods is given.
            depths: numbers of passages.
            speed: questions on which the first token is timed.
        """
        from rag_windows.cli.evaluation.running import compared, evaluate

        chosen = compared(
            methods,
            depths,
            numbers={"temperature": self.rag_temperature, "scale": self.rag_scale},
            link_tokens=self.link_tokens,
            profile=self.profile,
        )
        # A cache in memory alone, so that no other run's windows count.
        loaded = ModelOptions(
            model,
            device=self.device,
            dtype=self.dtype,
            max_window_tokens=self.max_window_tokens,
            verbose=self.verbose,
            profile=self.profile,
            cache_memory=self.cache_memory,
        )
        evaluate(
            source,
            chosen,
            search,
            loaded,
            out=self.out,
            system=self.system,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            speed=speed,
            fresh=self.fresh,
            as_json=self.json,
        )


@evaluation.command()
@spreading()
def inscit(
    *,
    data: Data,
    corpus: Annotated[
        Path | None,
        _option(
            "--corpus",
            "FILE",
            "Passages to search: JSONL with id, title, text. Default: the evidence passages that "
            "the data file holds.",
        ),
    ] = None,
    pool: Annotated[
        Literal["evidence"] | None,
        _option(
            "--pool",
            None,
            "Search the evidence passages of the data file; the same as no --corpus.",
        ),
    ] = None,
    model: options.Model = "tiny-reader",
    methods: Methods = METHODS,
    retriever: Annotated[
        Literal["bm25", "dense", "hybrid", "gold"],
        typer.Option(
            "--retriever",
            help="How passages are found; gold reads the right ones and nothing else.",
        ),
    ] = "bm25",
    embedder: Annotated[
        str | None,
        _option(
            "--embedder", "MODEL", "For dense and hybrid: a sentence-transformers name or folder."
        ),
    ] = None,
    top_k: TopK = ["20"],  # noqa: B006 - typer copies it
    asking: Asking,
    style: Style = "plain",
    evidence: Annotated[
        int,
        typer.Option(
            "--evidence",
            min=1,
            metavar="N",
            help="Passages that a prediction names as its evidence: those with most attention.",
        ),
    ] = 1,
    speed: Speed = 3,
) -> None:
    """INSCIT: conversations over Wikipedia; each turn is answered over retrieved passages.

    --data is the dataset's own dev.json or test.json. Predictions are written in its own format.
    """
    if corpus is not None and pool is not None:
        raise InputError("--corpus and --pool exclude each other; leave one of them out.")
    depths = numbers(top_k)
    chosen = {"corpus": _text(corpus), "style": style, "evidence": evidence}
    search = {"kind": retriever, "depth": max(depths), "embedder": embedder}
    source = _source("inscit", str(data), asking.limit, chosen)
    asking.ask(source, search, model, methods, depths, speed)


@evaluation.command()
@spreading()
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
    depths = numbers(top_k)
    source = _source("chatrag", str(data), asking.limit, {"dataset": dataset, "style": style})
    search = {"kind": "given", "depth": max(depths)}
    asking.ask(source, search, model, methods, depths, speed)


@evaluation.command()
@spreading(without=("max_new_tokens", "max_window_tokens"))
def icl(
    *,
    task: Annotated[
        str,
        _option(
            "--task",
            "FILE|NAME",
            "A JSONL file, or sst2, sst5, trec, mr or agnews, which come from the Hub.",
        ),
    ],
    demos: Annotated[
        Path | None,
        _option("--demos", "FILE", "What may be shown, where the task's file does not hold it."),
    ] = None,
    test: Annotated[
        Path | None, _option("--test", "FILE", "Texts of a named task, without the Hub.")
    ] = None,
    model: options.Model = "tiny-learner",
    methods: Methods = METHODS,
    shots: Annotated[
        list[str],
        typer.Option(
            "--shots",
            metavar="N,...",
            help="Demonstrations to show; several numbers are compared, and 0 shows none.",
        ),
    ] = ["32"],  # noqa: B006 - typer copies it
    demo_seed: Annotated[
        list[str],
        typer.Option(
            "--demo-seed",
            metavar="N,...",
            help="Of the draw of demonstrations; each text is asked once for each.",
        ),
    ] = ["0"],  # noqa: B006 - typer copies it
    windows: Annotated[
        int | None,
        _option(
            "--windows",
            "N",
            "Windows to spread the demonstrations over. Default: one for every eight, up to "
            "eight; more where those don't hold them.",
            min=1,
        ),
    ] = None,
    window_tokens: Annotated[
        int | None, _option("--window-tokens", "N", "Or how long a window is at most.", min=1)
    ] = None,
    normalize: Annotated[
        Literal["auto", "sum", "mean"],
        typer.Option(
            "--normalize",
            help="How a choice's tokens are counted together; auto: the mean for the texts of "
            "multiple choice, else the sum.",
        ),
    ] = "auto",
    calibrate_with: Annotated[
        list[str] | None,
        _option(
            "--calibrate-with",
            "TEXT",
            "A text that says nothing, such as N/A: its label probabilities divide the others.",
        ),
    ] = None,
    template: Annotated[
        str | None,
        _option(
            "--template", "FORM", 'How a demonstration is written. Default: "{text}: {label}".'
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        _option(
            "--label",
            "LABEL",
            "A label to choose from; repeat it for each. Default: those of the demonstrations.",
        ),
    ] = None,
    wording: Annotated[
        Literal["pcw", "structured-prompting"],
        typer.Option("--wording", help="Whose templates and labels a named task takes."),
    ] = "pcw",
    choices: Annotated[
        Literal["text", "letters"],
        typer.Option(
            "--choices",
            help="Multiple choice: compare the choices' texts, or the letters they have.",
        ),
    ] = "text",
    asking: Asking,
) -> None:
    """In-context learning: classification and multiple choice, demonstrations in windows."""
    depths = numbers(shots, "--shots", least=0)
    chosen = {
        "demonstrations": _text(demos),
        "test": _text(test),
        "seeds": list(numbers(demo_seed, "--demo-seed", least=0)),
        "windows": windows,
        "window_tokens": window_tokens,
        "normalize": None if normalize == "auto" else normalize,
        "calibrate_with": calibrate_with or [],
        "template": template,
        "labels": label or None,
        "wording": wording,
        "choices_as": choices,
    }
    source = _source("icl", task, asking.limit, chosen)
    asking.ask(source, {"kind": "given", "depth": None}, model, methods, depths)


@evaluation.command()
@spreading(without=("limit",))
def long(
    *,
    task: Annotated[
        Path | None,
        _option(
            "--task",
            "FILE",
            'JSONL with "question", "answer" and "needle". Default: questions made here.',
        ),
    ] = None,
    haystack: Annotated[
        Path | None,
        _option(
            "--haystack",
            "DIR",
            "Texts to hide the needles in. Default: the file's own, or the sample corpus.",
        ),
    ] = None,
    passages: Annotated[
        list[str],
        typer.Option(
            "--passages", metavar="N,...", help="How many there are, the needle's included."
        ),
    ] = ["1,4,16,64"],  # noqa: B006 - typer copies it
    positions: Annotated[
        list[str],
        typer.Option(
            "--positions",
            metavar="X,...",
            help="Where the needle stands, from 0 (first) to 1 (last).",
        ),
    ] = ["0,0.5,1"],  # noqa: B006 - typer copies it
    questions: Annotated[
        int | None,
        _option(
            "--questions",
            "N",
            "In each cell, the same ones. Default: all of a file, else 10.",
            min=1,
        ),
    ] = None,
    passage_words: options.PassageWords = 100,
    model: options.Model = "tiny-reader",
    methods: Methods = METHODS,
    asking: Asking,
    speed: Speed = 8,
) -> None:
    """A needle among more and more passages, first, in the middle and last."""
    given = ",".join(positions)
    try:
        depths = [float(word) for word in given.split(",")]
    except ValueError:
        raise InputError(
            f"--positions {given!r} is no list of numbers from 0 to 1, such as 0,0.5,1."
        ) from None
    chosen = {
        "haystack": _text(haystack),
        "sizes": list(numbers(passages, "--passages")),
        "depths": depths,
        "questions": questions,
        "seed": asking.seed,
        "passage_words": passage_words,
    }
    source = _source("long", _text(task), None, chosen)
    asking.ask(source, {"kind": "given", "depth": None}, model, methods, (None,), speed)


@evaluation.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Folders that runs wrote.")
    ],
    out: Annotated[
        Path | None,
        _option("--out", "DIR", "Where the report goes. Default: the folder of the (first) run."),
    ] = None,
    data: Annotated[
        Path | None,
        _option(
            "--data",
            "FILE",
            "The data file, where it does not lie any more where the run read it.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Score runs again and write their report, several runs in one."""
    from rag_windows.cli.evaluation.running import report as write

    write(folders, out, data, as_json=json)


@score.command("inscit")
def score_inscit(
    data: Data,
    predictions: Predictions,
    by_type: Annotated[
        bool,
        typer.Option("--by-type", help="For each type of response instead of all together."),
    ] = False,
    json: options.Json = False,
) -> None:
    """INSCIT's own metrics (evidence F1, sacreBLEU, response F1), and ChatRAG-Bench's F1."""
    from rag_windows.evaluation.inscit import score_inscit as scored

    found = scored(data, predictions, by_type=by_type)
    if json:
        made = {kind: _plain(scores) for kind, scores in found.items()}
        render.write_json(made if by_type else made[""])
    elif by_type:
        _show_types(found)
    else:
        _show_scores(found[""])


@score.command("chatrag")
def score_chatrag(
    data: Data,
    dataset: Dataset,
    predictions: Predictions,
    answerable: Annotated[
        Path | None,
        _option(
            "--answerable",
            "FILE",
            "QuAC: the benchmark's list of the questions that can be answered.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """ChatRAG-Bench's metrics of a file with an answer a line."""
    from rag_windows.evaluation.chatrag import score_chatrag as scored

    found = scored(data, dataset, predictions, answerable)
    if json:
        render.write_json(_plain(found))
    else:
        _show_scores(found)


evaluation.add_typer(score, name="score")


def _source(kind: Any, data: str | None, limit: int | None, chosen: dict[str, Any]) -> Source:
    from rag_windows.cli.evaluation.source import Source

    return Source(kind=kind, data=data, limit=limit, options=chosen)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _plain(scores: Mapping[str, float]) -> dict[str, float | None]:
    # NaN is no JSON: a score of no question at all is null.
    return {name: None if math.isnan(value) else value for name, value in scores.items()}


def _shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return str(value) if name == "n" else f"{value:.2f}"


def _show_scores(scores: Mapping[str, float]) -> None:
    """Print scores: percent, and "n", how many answers they are of."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in scores.items():
        table.add_row(name, _shown(name, value))
    render.console().print(table)


def _show_types(types: Mapping[str, Mapping[str, float]]) -> None:
    """The same for each type of response, a row each."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    names = list(next(iter(types.values()), {}))
    for name in names:
        table.add_column(name, justify="right")
    for kind, scores in types.items():
        cells = [_shown(name, scores[name]) for name in names]
        table.add_row(Text(one_line(kind)), *cells)
    render.console().print(table)
