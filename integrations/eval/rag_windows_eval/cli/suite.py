"""Many datasets with one model: what is asked, how long that takes, one report of all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rag_windows import cli
from rag_windows.cli import progress, tell
from rag_windows.errors import InputError
from rag_windows_eval import report
from rag_windows_eval import run as runs
from rag_windows_eval.cli.running import (
    DataOptions,
    Evaluation,
    command,
    default_folder,
    going_on,
    models,
    reported,
    tell_failed,
)
from rag_windows_eval.files import read, write_whole
from rag_windows_eval.summary import as_json
from rag_windows_eval.task import TaskExample

if TYPE_CHECKING:
    from rag_windows.cli import RayOptions
    from rag_windows_eval.cli.app import SuiteOptions

INSCIT = "inscit"
CHATRAG = {
    "doc2dial": "doc2dial/test.json",
    "quac": "quac/test.json",
    "qrecc": "qrecc/test.json",
    "inscit": "inscit/dev.json",
    "topiocqa": "topiocqa/dev.json",
    "coqa": "coqa/dev.json",
    "doqa_cooking": "doqa/test_cooking.json",
    "doqa_travel": "doqa/test_travel.json",
    "doqa_movies": "doqa/test_movies.json",
    "sqa": "sqa/test.json",
    "hybridial": "hybridial/test.json",
    "convfinqa": "convfinqa/dev.json",
}
"""ChatRAG-Bench's datasets and their files, as its repository on the Hub has them."""

SETS = (INSCIT, *(f"chatrag/{name}" for name in CHATRAG))
"""The sets of a suite, in this order."""

_INSCIT_FROM = (
    "take dev.json from the folder data of github.com/ellenmellon/INSCIT, and name it with --inscit"
)
_CHATRAG_FROM = (
    "download it with: hf download nvidia/ChatRAG-Bench --repo-type dataset --local-dir chatrag; "
    "and name the folder with --chatrag"
)

MEASURED = 5
"""Questions of each set that are timed before the others are asked."""


def named(sets: str, every: Sequence[str] = SETS) -> list[str]:
    """The sets of a list; "chatrag" and "passages" stand for all of theirs."""
    words = [word.strip() for word in sets.split(",")]
    for word in words:
        if not any(word in (one, one.partition("/")[0]) for one in every):
            raise InputError(
                f"There is no set {word!r}. Choose from {', '.join(every)}; chatrag stands for "
                "all of its files, and passages for all files of --passages."
            )
    return [one for one in every if {one, one.partition("/")[0]} & set(words)]


def sources(asking: SuiteOptions) -> dict[str, DataOptions]:
    """The data source of each set; an `InputError` names the sets whose files are missing."""
    made, lacking = dict[str, DataOptions](), dict[str, str]()
    files = {f"passages/{Path(one).name.partition('.')[0]}": one for one in asking.passages or ()}
    if len(files) < len(asking.passages or ()):
        raise InputError(
            "Two files of --passages have the same name, which would be the name of two sets. "
            "Rename one of them."
        )
    every = (*SETS, *files)
    for name in every if asking.sets is None else named(asking.sets, every):
        kind, _, own = name.partition("/")
        data, chosen = None, dict[str, Any]()
        if name == INSCIT:
            data, chosen = asking.inscit, {"corpus": None, "evidence": 1}
            if data is None or not Path(data).is_file():
                lacking[name] = f"{data or 'its file'} is not there; {_INSCIT_FROM} FILE"
        elif kind == "chatrag":
            data, chosen = asking.chatrag, {"dataset": own}
            places = [Path(data or "") / inside / CHATRAG[own] for inside in ("", "data")]
            found = next((one for one in places if data is not None and one.is_file()), None)
            if found is None:
                missed = f"{CHATRAG[own]} is not in {data}" if data else "its files are not there"
                lacking[name] = f"{missed}; {_CHATRAG_FROM} DIR"
            data = str(found)
        else:
            data, chosen = files[name], {"seed": asking.seed}
            if not Path(data).is_file():
                lacking[name] = f"{data} is not there; name a file that is with --passages FILE"
        fields = {"kind": kind, "data": data, "limit": asking.limit, "options": chosen}
        made[name] = DataOptions.model_validate({**fields, "command": command()})
    if lacking:
        error = InputError(
            f"The files of {len(lacking)} of {len(made)} sets are missing. Get them, or name the "
            "other sets with --sets to leave these out."
        )
        for why, names in _by_reason(lacking):
            error.add_note(f"- {', '.join(names)}: {why}.")
        if others := [name for name in made if name not in lacking]:
            error.add_note(f"Those that can be asked: --sets {','.join(_short(others))}")
        raise error
    return made


def _by_reason(lacking: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    for why in dict.fromkeys(lacking.values()):
        yield why, [name for name, own in lacking.items() if own == why]


def _short(names: Sequence[str]) -> list[str]:
    """Names of sets; where all sets of a kind are there, the kind's name."""
    made = []
    for name in names:
        kind = name.partition("/")[0]
        of_kind = [one for one in SETS if one.partition("/")[0] == kind]
        made.append(kind if set(of_kind) <= set(names) else name)
    return list(dict.fromkeys(made))


def size(example: TaskExample) -> int:
    """Characters of an example's own passages, which its seconds depend on."""
    return sum(len(one.text) for one in example.passages)


def sample(examples: Sequence[TaskExample]) -> list[TaskExample]:
    """Some examples from the shortest to the longest, as in a quantile plot."""
    ordered = sorted(examples, key=size)
    places = np.linspace(0, len(ordered) - 1, min(MEASURED, len(ordered))).round().astype(int)
    return [ordered[place] for place in places]


@dataclass(frozen=True, slots=True)
class Left:
    """What is still to be asked: answers, and the seconds of a model's work that they may take."""

    answers: int = 0
    seconds: float = 0.0

    def __add__(self, other: Left) -> Left:
        return Left(self.answers + other.answers, self.seconds + other.seconds)

    @classmethod
    def of(cls, one: Evaluation, folder: runs.RunFolder) -> Left:
        """The rest of one set: seconds by size are interpolated from its answers so far."""
        answers, seconds = 0, 0.0
        for condition in one.conditions:
            done = {key: r for key, r in folder.records[condition.name].items() if r.error is None}
            lacking = [size(example) for example in one.task.examples if example.key not in done]
            known = [
                (size(example), done[example.key].total_s)
                for example in one.task.examples
                if example.key in done
            ]
            answers += len(lacking)
            if known and lacking:
                took: dict[int, list[float]] = {}
                for characters, answer_s in sorted(known):
                    took.setdefault(characters, []).append(answer_s)
                seconds += float(
                    np.interp(lacking, list(took), list(map(fmean, took.values()))).sum()
                )
        return cls(answers, seconds)


def duration(seconds: float) -> str:
    """A duration in words, such as "3.2 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


class Suite(BaseModel, extra="forbid"):
    """The file of a suite's folder: its sets with the folders of their runs inside, its times.

    ``estimate_s`` was reported before it began, from so many ``measured`` questions; ``answers_s``
    is what its answers took. Both are seconds of one model's work.
    """

    format: Literal["rag-windows evaluation suite"] = "rag-windows evaluation suite"
    version: Literal[1] = 1
    sets: dict[str, str]
    measured: int
    estimate_s: float
    answers_s: float = 0.0

    @classmethod
    def of(cls, path: Path) -> Suite | None:
        """Read the suite of a folder; None if it holds none."""
        return read(path / SUITE).json(cls) if (path / SUITE).is_file() else None

    @property
    def hours(self) -> str:
        """A sentence for the report."""
        took = f"; its answers took {duration(self.answers_s)}" if self.answers_s else ""
        return (
            f"Before it began, this suite was estimated at {duration(self.estimate_s)} of one "
            f"model's work, from {self.measured} measured questions{took}."
        )


SUITE = "suite.json"


def _reading(asking: SuiteOptions, name: str) -> tuple[list[int | None], dict[str, Any]]:
    """How many passages of a set are read, and how they are found."""
    if name == INSCIT:
        return [asking.top_k], {"kind": "bm25", "depth": asking.top_k}
    if name.startswith("chatrag/"):
        ranked = {"kind": "given" if asking.embedder is None else "dense"}
        return [asking.top_k], {**ranked, "depth": asking.top_k, "embedder": asking.embedder}
    return [None], {}


def run_suite(asking: SuiteOptions, over: RayOptions) -> None:
    """Measure some questions of each set, tell how long all take, ask them, and report."""
    evaluations = {
        name: Evaluation.of(asking, source, *_reading(asking, name))
        for name, source in sources(asking).items()
    }
    with models(asking, over) as (model, ask), ExitStack() as stack:
        manifests = {name: one.manifest(model) for name, one in evaluations.items()}
        out = asking.out or default_folder("suite", asking.name, list(manifests.values()))
        stack.enter_context(runs.locked(out))
        sets = {name: name.replace("/", "-") for name in evaluations}
        folders = {
            name: stack.enter_context(
                runs.RunFolder.begin(out / sets[name], manifests[name], asking.fresh)
            )
            for name in evaluations
        }
        stack.enter_context(going_on(out))
        suite = None if asking.fresh else Suite.of(out)
        rankings = {name: one.ranking(folders[name]) for name, one in evaluations.items()}
        samples = {name: sample(one.task.examples) for name, one in evaluations.items()}
        if suite is None:
            # What is compiled or loaded for a method's first question is not timed.
            name, one = next(iter(evaluations.items()))
            passages = rankings[name](samples[name][0])
            asked = [(c, [(samples[name][0], passages[: c.top_k])]) for c in one.conditions]
            list(ask(one.answerer)([asked]))
        for name, one in evaluations.items():
            one.answer(folders[name], ask, rankings[name], samples[name])
        left = sum((Left.of(one, folders[name]) for name, one in evaluations.items()), Left())
        if suite is None or suite.sets != sets:
            measured = sum(map(len, samples.values()))
            took = _answers_s(folders.values())
            suite = Suite(sets=sets, measured=measured, estimate_s=took + left.seconds)
        _write(out, suite)
        _tell_left(left, len(evaluations), over.replicas or 1)
        done, failed, files = [], [], dict[str, Any]()
        for name, one in evaluations.items():
            failed += one.answer(folders[name], ask, rankings[name])
            run, files[name] = one.score(folders[name])
            done.append(run)
        suite = suite.model_copy(update={"answers_s": _answers_s(folders.values())})
        _write(out, suite)
        reports = report.write_report(done, out, suite.hours)
        scores = suite.model_dump() | {
            "sets": {name: as_json(one.summary) for name, one in zip(sets, done, strict=True)},
            "means": report.means_of(done),
        }
        scores = to_jsonable_python(scores, inf_nan_mode="null")
        write_whole(out / runs.SCORES, json.dumps(scores, indent=1) + "\n")
    if asking.json:
        for name, own in files.items():
            scores["sets"][name]["files"] = own
        where = {"folder": str(out), "report": [str(one) for one in reports]}
        cli.write_json({**scores, "files": {**where, "scores": str(out / runs.SCORES)}})
    else:
        cli.show(f"{report.terminal_of_all(done, suite.hours)}\n")
        cli.show(f"Scores and report of all sets, and a folder of each: {out}", "dim")
    tell_failed(failed)


def _answers_s(folders: Any) -> float:
    return sum(
        record.total_s
        for folder in folders
        for records in folder.records.values()
        for record in records.values()
    )


def _write(out: Path, suite: Suite) -> None:
    write_whole(out / SUITE, suite.model_dump_json(indent=1) + "\n")


def _tell_left(left: Left, sets: int, replicas: int) -> None:
    if left.answers:
        over = f", {duration(left.seconds / replicas)} over {replicas} processes"
        tell(
            f"{left.answers:,} answers to questions of {sets} sets are left: about "
            f"{duration(left.seconds)} of one model's work{over if replicas > 1 else ''}."
        )


def report_again(folders: Sequence[Path], out: Path, data: str | None, *, json_only: bool) -> None:
    """Score runs again and write one report of them; a suite's folder stands for its runs."""
    paths, hours = [], ""
    for path in folders:
        if (suite := Suite.of(path)) is None:
            paths.append(path)
        else:
            paths += [path / one for one in suite.sets.values()]
            hours = suite.hours if len(folders) == 1 else ""
    done = [reported(path, data) for path in paths]
    with progress("Scoring"):
        files = [str(one) for one in report.write_report(done, out, hours)]
    if json_only:
        nothing: dict[str, Any] = {"scores": None, "predictions": {}, "report": []}
        pairs = zip(done, paths, strict=True)
        summaries = [
            {**as_json(one.summary), "files": {"folder": str(path), **nothing}}
            for one, path in pairs
        ]
        cli.write_json({"runs": summaries, "report": files})
        return
    for one in done:
        cli.show(f"{report.terminal(one.summary)}\n")
    if len(done) > 1:
        cli.show(f"{report.terminal_of_all(done, hours)}\n")
    cli.show(f"Report: {', '.join(files)}", "dim")
