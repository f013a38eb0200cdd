"""A run: its conditions, its folder, and the loop that asks its questions and can be resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pandas as pd
from filelock import FileLock, Timeout
from pydantic import BaseModel

from rag_windows import Generation, Passage, WindowedLM
from rag_windows.calibration import ModelFingerprint
from rag_windows.errors import (
    DataError,
    InputError,
    LimitError,
    MissingExtraError,
    ModelError,
    RagWindowsError,
)
from rag_windows.integration import tokenizer_fingerprint
from rag_windows.methods import Method, describe, plain
from rag_windows.request import check_citations, in_order
from rag_windows_eval.files import (
    add_lines,
    cut_torn,
    read,
    read_lines,
    shown,
    surroundings,
    write_whole,
)
from rag_windows_eval.task import (
    AnswerRecord,
    ReadPassage,
    Task,
    TaskExample,
    digest_of,
    line_of,
)

if TYPE_CHECKING:
    from rag_windows_retrievers import Encoder, Retriever

R = TypeVar("R")
T = TypeVar("T")

BASE = "sequential"
"""The method that others are compared with, where it was run at the same depth."""

MANIFEST, RECORDS, PASSAGES = "manifest.json", "records.jsonl", "passages.jsonl"
SOURCE, SCORES, REPORTS = "source.json", "scores.json", ("report.html", "report.md")
PREDICTIONS, INDEX = "predictions", "index"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: a method, as the user named it, with ``top_k`` passages at most.

    ``method`` is None in a run read from its folder, ``top_k`` None for all passages of an example.
    """

    label: str
    method: Method | None = None
    top_k: int | None = None

    @property
    def name(self) -> str:
        """Unique in a run, such as "ape@20"."""
        return self.label if self.top_k is None else f"{self.label}@{self.top_k}"


def conditions(
    methods: Sequence[tuple[str, Method]], depths: Sequence[int | None]
) -> tuple[Condition, ...]:
    """Combine each depth with each method, in this order, and refuse duplicates."""
    made = tuple(Condition(label, method, depth) for depth in depths for label, method in methods)
    names = [one.name for one in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice} is named twice. Name each method once.")
    return made


def base_of(compared: Sequence[Condition], place: int) -> int:
    """Place of the condition that one is compared with: sequential at its depth, else the first."""
    depth = compared[place].top_k
    alike = (i for i, one in enumerate(compared) if one.label == BASE and one.top_k == depth)
    return next(alike, 0)


@dataclass(frozen=True, slots=True)
class Described:
    """The model of a run: its settings, and the versions and the machine that it runs on."""

    settings: dict[str, Any]
    made_with: dict[str, str]

    @classmethod
    def of(cls, lm: WindowedLM) -> Described:
        """Describe a model that is loaded in this process."""
        model = ModelFingerprint.of(lm.model)
        settings: dict[str, Any] = {
            "name": model.name,
            "sha256": model.fingerprint,
            "tokenizer": tokenizer_fingerprint(lm.tokenizer).hex(),
            "dtype": str(lm.model.dtype).removeprefix("torch."),
            "header": plain(lm.header),
            "max_window_tokens": lm.max_window_tokens,
            "template": {key: plain(one) for key, one in sorted(lm.template_kwargs.items())},
        }
        return cls(settings, surroundings())


class Manifest(BaseModel, extra="forbid"):
    """The manifest of a run, a file of its folder.

    ``settings`` are all that the answers depend on; ``made_with`` are versions and machines, one
    entry for each change of them; ``keys`` are those of all examples in order.
    """

    format: Literal["rag-windows evaluation run"] = "rag-windows evaluation run"
    version: Literal[1] = 1
    settings: dict[str, Any]
    made_with: tuple[dict[str, str], ...]
    keys: tuple[str, ...]

    @classmethod
    def of(
        cls,
        model: Described,
        task: Task,
        compared: Sequence[Condition],
        retriever: Mapping[str, Any],
        generating: Generating,
    ) -> Manifest:
        """The manifest of a new run; ``retriever`` says how passages are ranked."""
        keys = [example.key for example in task.examples]
        settings = {
            "task": {**task.settings, "name": task.name},
            "examples": {
                "count": len(keys),
                "sha256": hashlib.sha256(json.dumps(keys).encode()).hexdigest(),
            },
            "model": model.settings,
            "arms": {
                one.name: {"method": one.method and describe(one.method), "top_k": one.top_k}
                for one in compared
            },
            "retriever": retriever,
            **asdict(generating),
        }
        # Through JSON, so that it equals what will be read back.
        made = {"settings": settings, "made_with": [model.made_with], "keys": keys}
        return cls.model_validate_json(json.dumps(made))

    def differing(self, earlier: Manifest) -> list[str]:
        """What keeps this run from going on where an earlier one stopped.

        More questions of the same data, and more conditions over them, do not.
        """
        there, now = earlier.settings, self.settings
        before, after = (one.get("arms", {}) for one in (there, now))
        if before.keys() <= after.keys():
            now = {**now, "arms": {name: after[name] for name in before}}
        if len(self.keys) > len(earlier.keys) and self.keys[: len(earlier.keys)] == earlier.keys:
            there, now = _any_number(there), _any_number(now)
        return differences(there, now)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions, in order; their methods may be unknown here."""
        return tuple(
            Condition(name.removesuffix(f"@{one['top_k']}"), top_k=one["top_k"])
            for name, one in self.settings.get("arms", {}).items()
        )


def _any_number(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without how many questions are asked."""
    task = {name: one for name, one in settings["task"].items() if name not in _HOW_MANY}
    return {**settings, "task": task, "examples": None}


_HOW_MANY = ("questions", "limit")


def differences(there: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between two settings: files by digest, conditions that came or went by name."""
    if (before := there.get("arms", {})) != (after := now.get("arms", {})):
        rest = differences({**there, "arms": {}}, {**now, "arms": {}})
        if before.keys() != after.keys():
            return [f"it compares {_some(before)}, and this command {_some(after)}", *rest]
        both = {"arms": before}, {"arms": after}
        return [*_differences(*both), *rest]
    return _differences(there, now)


def _some(names: Iterable[str]) -> str:
    """The first names, as part of a sentence, and how many more there are."""
    first, more = list(names)[:5], len(list(names)) - 5
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _differences(there: dict[str, Any], now: dict[str, Any]) -> list[str]:
    old, new = (pd.json_normalize(one).to_dict("records")[0] for one in (there, now))
    return [
        f"{name} is {shown(old.get(name))} there and {shown(new.get(name))} now"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name) and not name.endswith(".file")
    ]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder, if it is missing, and lock it for writing; never waits."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except (OSError, Timeout) as error:
        raise InputError(
            f"{folder} can't be created or locked ({error}). Wait for the process that writes to "
            "it, or name another folder with --out."
        ) from error
    with lock:
        yield


class RunFolder:
    """The folder of a run, with what is stored there.

    ``records`` are by condition and example's key, the last one counts; ``texts`` are by digest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.texts: dict[str, str] = {}
        self.records: dict[str, dict[str, AnswerRecord]] = {
            one.name: {} for one in manifest.conditions
        }
        for place, found in read_lines(path / RECORDS, AnswerRecord):
            if found.arm not in self.records:
                raise DataError(
                    f'{place}: "arm" is {shown(found.arm)}, which is not in the run\'s manifest. '
                    "Name another folder with --out."
                )
            self.records[found.arm][found.key] = found
        for place, one in read_lines(path / PASSAGES, dict[str, str]):
            text = one.get("passage", "")
            if one.get("text") != digest_of(text):
                raise DataError(
                    f"{place}: the passage was changed since the run began. Start again "
                    "in another folder."
                )
            self.texts[digest_of(text)] = text

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Read a run, also one that is being written; nothing is changed."""
        return cls(Path(path), read(Path(path) / MANIFEST).json(Manifest))

    @classmethod
    @contextmanager
    def begin(cls, folder: Path, manifest: Manifest, fresh: bool = False) -> Iterator[RunFolder]:
        """Continue a run, or begin it; locks the folder.

        With ``fresh``, what an earlier run left here is removed; other files stay.
        """
        with locked(folder):
            known = (folder / MANIFEST).is_file()
            if not known and (folder / RECORDS).exists():
                raise InputError(
                    f"{folder} holds {RECORDS} but no {MANIFEST}. Name another folder with --out."
                )
            if known and fresh:
                _remove_run(folder)
            elif known:
                earlier = read(folder / MANIFEST).json(Manifest)
                if different := manifest.differing(earlier):
                    raise InputError(
                        f"{folder} holds a run with other settings: {'; '.join(different)}. "
                        "Remove it and start again with --fresh, or name another folder with "
                        "--out."
                    )
                same = earlier.made_with[-1:] == manifest.made_with
                manifest.made_with = (*earlier.made_with, *(() if same else manifest.made_with))
            write_whole(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
            cut_torn(folder / RECORDS)
            cut_torn(folder / PASSAGES)
            yield cls(folder, manifest)

    def add(self, answers: Sequence[Answered]) -> None:
        """Store answers, with the passages that they name; they are on disk afterwards."""
        texts = {digest_of(text): text for _, own in answers for text in own}
        new = {name: text for name, text in texts.items() if name not in self.texts}
        added = [{"text": name, "passage": text} for name, text in new.items()]
        add_lines(self.path / PASSAGES, added)
        self.texts |= new
        add_lines(self.path / RECORDS, [line_of(record) for record, _ in answers])
        for record, _ in answers:
            self.records[record.arm][record.key] = record


def _remove_run(folder: Path) -> None:
    """Remove what a run has written, and nothing else."""
    shutil.rmtree(folder / PREDICTIONS, ignore_errors=True)
    shutil.rmtree(folder / INDEX, ignore_errors=True)
    # The manifest last, so that a removal that was stopped can be done again.
    for name in (RECORDS, PASSAGES, SOURCE, SCORES, *REPORTS, MANIFEST):
        (folder / name).unlink(missing_ok=True)


# Which passages an example is read with.

Ranking = Callable[[TaskExample], Sequence[Passage]]
"""Gives an example's passages, best first."""

TURNS, WEIGHT = 3, 3
"""Arguments of `last_turns`, which makes a query of a conversation; also in the manifest."""


@dataclass(frozen=True, slots=True)
class Search:
    """How passages are found, at most ``depth`` of them; None for all that are given.

    "gold" and "given" are the example's own passages, "hybrid" is BM25 and dense search by
    reciprocal rank fusion. Dense search needs an embedder: a sentence-transformers name or folder,
    or an `Encoder`; of a task without a pool it ranks each example's own passages.
    """

    kind: Literal["bm25", "dense", "hybrid", "gold", "given"] = "given"
    depth: int | None = None
    embedder: Encoder | str | None = None

    def __post_init__(self) -> None:
        if (self.embedder is None) == (self.kind in ("dense", "hybrid")):
            raise InputError(
                f"--retriever {self.kind} does not fit --embedder: dense and hybrid need it (the "
                "name or folder of a sentence-transformers model), the others take none."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the task that rankings depend on, for the manifest."""
        settings: dict[str, Any] = {"retriever": self.kind, "depth": self.depth}
        if self.kind not in ("gold", "given"):
            settings["query"] = {"turns": TURNS, "weight": WEIGHT}
        if self.embedder is not None:
            settings["embedder"] = getattr(self.embedder, "name", self.embedder)
        return settings

    def over(
        self, task: Task, index: Path, progress: Callable[[int, int], None] | None = None
    ) -> Ranking:
        """Rank an example's passages with its conversation as the query.

        Vectors are stored in ``index`` for resumed runs; ``progress`` counts embedded passages.
        """
        if self.kind in ("gold", "given"):
            return lambda example: example.passages[: self.depth]
        from rag_windows_retrievers import (
            BM25Retriever,
            ConversationalRetriever,
            HybridRetriever,
            Index,
            last_turns,
        )

        if self.kind == "dense" and self.embedder is not None and not task.pool:
            return _by_meaning(self.embedder, self.depth)
        found: list[Retriever] = []
        if self.kind != "dense":
            found.append(BM25Retriever(task.pool))
        if self.embedder is not None:
            vectors = Index(index, self.embedder)
            stored = {one.id for one in vectors.passages}
            if missing := [one for one in task.pool if one.id not in stored]:
                vectors.add_passages(missing, progress=progress)
            found.append(vectors.by_meaning)
        most = self.depth or 0
        retriever = found[0] if len(found) == 1 else HybridRetriever(found, depth=max(100, most))
        conversational = ConversationalRetriever(retriever, last_turns(TURNS, weight=WEIGHT))
        return lambda example: conversational.retrieve(example.conversation, most)


def _by_meaning(embedder: Encoder | str, depth: int | None) -> Ranking:
    """Ranks each example's own passages."""
    from rag_windows_retrievers import (
        ConversationalRetriever,
        DenseRetriever,
        SentenceEncoder,
        last_turns,
    )

    encoder = SentenceEncoder(embedder) if isinstance(embedder, str) else embedder
    known: DenseRetriever | None = None

    def ranking(example: TaskExample) -> Sequence[Passage]:
        nonlocal known
        # The questions of a conversation follow each other, mostly over the same passages.
        known = DenseRetriever(example.passages, encoder, known=known)
        asked = ConversationalRetriever(known, last_turns(TURNS, weight=WEIGHT))
        return asked.retrieve(example.conversation, depth or len(example.passages))

    return ranking


# How examples are answered.

Asked = tuple[TaskExample, Sequence[Passage]]
"""An example with its passages, best first, not more than the condition reads."""

Answered = tuple[AnswerRecord, Sequence[str]]
"""An answer's record, with the texts of the passages that it names."""

Answerer = Callable[[WindowedLM, Condition, Sequence[Asked]], list[Answered]]
"""Answers some examples by one condition; the error of a single example becomes its record."""

Block = Sequence[tuple[Condition, Sequence[Asked]]]
"""Examples for each condition that is to answer them, in this order."""

Asking = Callable[[Iterable[Block]], Iterable[Sequence[Answered]]]
"""Answers blocks in any order, wherever models are, and yields answers as they are ready."""


def as_far_as_fits(
    condition: Condition, items: Sequence[T], ask: Callable[[Sequence[T]], R]
) -> tuple[R, Sequence[T]]:
    """Answer over as many items as fit; gives the answer and the items that were read.

    A method that reads all items as one sequence drops a twentieth of them at its end until the
    others fit. In windows, fewer items would fit no better.
    """
    while True:
        try:
            return ask(items), items
        except LimitError:
            shorter = items[: -max(1, len(items) // 20)]
            if condition.method is None or not in_order(condition.method) or not shorter:
                raise
            items = shorter


@dataclass(frozen=True, slots=True)
class Generating:
    """Generates answers greedily; the seed is for methods that draw random numbers."""

    prefix: str | None
    max_new_tokens: int
    seed: int = 0
    behind_own_system: bool = False
    citations: bool | str = True

    @classmethod
    def of(
        cls, task: Task, prefix: str | None = None, max_new_tokens: int | None = None, seed: int = 0
    ) -> Generating:
        """The task's values, unless others are given; a prefix of "" means none."""
        chosen = task.prefix if prefix is None else prefix
        behind = prefix is None and task.behind_own_system
        return cls(chosen or None, max_new_tokens or task.max_new_tokens, seed, behind)

    def prefix_of(self, lm: WindowedLM) -> str | None:
        """The system prompt of this model."""
        if self.prefix is None or not self.behind_own_system:
            return self.prefix
        return lm.behind_own_system(self.prefix)

    def citations_of(self, lm: WindowedLM, condition: Condition) -> bool | str:
        """Removal, where it is asked for and the method can leave a passage out."""
        try:
            check_citations(self.citations, lm.engine.method_of(condition.method))
        except InputError:
            return True
        return self.citations

    def answer(
        self, lm: WindowedLM, condition: Condition, asked: Sequence[Asked]
    ) -> list[Answered]:
        """Answer each example by itself."""
        return [self._one(lm, condition, *one) for one in asked]

    def _one(
        self,
        lm: WindowedLM,
        condition: Condition,
        example: TaskExample,
        passages: Sequence[Passage],
    ) -> Answered:
        def ask(some: Sequence[Passage]) -> Generation:
            return lm.generate(
                list(example.messages),
                some,
                prefix=self.prefix_of(lm),
                method=condition.method,
                citations=self.citations_of(lm, condition),
                max_new_tokens=self.max_new_tokens,
                seed=self.seed,
                do_sample=False,
                num_beams=1,
            )

        generation, fitting = as_far_as_fits(condition, passages, ask)
        spans: list[list[tuple[int, int]]] = [[] for _ in fitting]
        for window in generation.windows:
            spans[window.passage].append((window.start, window.end))
        # Citations exist, but are empty, where attention was not measured.
        measured = generation.citations if generation.prefix_mass is not None else None
        cited = {one.passage: one for one in measured or ()}
        usage = generation.usage
        record = AnswerRecord(
            key=example.key,
            arm=condition.name,
            answer=generation.text,
            finish_reason=generation.finish_reason,
            passages=tuple(
                ReadPassage(
                    *(digest_of(one.text), one.id, one.title, one.score),
                    mass=cited[place].mass if place in cited else None,
                    spans=tuple(spans[place]),
                    drop=cited[place].drop if place in cited else None,
                    supports=cited[place].supports if place in cited else None,
                )
                for place, one in enumerate(fitting)
            ),
            left_out=len(passages) - len(fitting),
            prefix_mass=generation.prefix_mass,
            query_mass=generation.query_mass,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            windows_encoded=usage.windows - usage.cached_windows,
            windows_reused=usage.cached_windows,
            **asdict(generation.timings),
            notes=tuple(note.message for note in generation.notes),
            supported=generation.supported,
            tokens=generation.token_ids if isinstance(self.citations, str) else (),
        )
        return record, [passage.text for passage in fitting]


def answers(lm: WindowedLM, answerer: Answerer, block: Block) -> Iterator[Sequence[Answered]]:
    """A block's answers by one model; the error of one question becomes its record.

    Errors of the whole run are raised: an unusable model or package, lack of memory, interruption.
    """
    for condition, asked in block:
        try:
            yield answerer(lm, condition, asked)
        except (ModelError, MissingExtraError):
            raise
        except RagWindowsError as error:
            if len(asked) > 1:
                yield from answers(lm, answerer, [(condition, [one]) for one in asked])
            else:
                yield [_failed(asked[0][0], condition, error)]


def timed(
    answerer: Answerer, lm: WindowedLM, condition: Condition, asked: Sequence[Asked]
) -> list[Answered]:
    """Answer each example with an empty cache, then with its windows cached, for ``warm_s``."""
    made = []
    for one in asked:
        if lm.cache is not None:
            lm.cache.clear()
        ((record, texts),) = answerer(lm, condition, [one])
        ((again, _),) = answerer(lm, condition, [one])
        made.append((replace(record, warm_s=again.ttft_s), texts))
    return made


def asking_one(lm: WindowedLM, answerer: Answerer) -> Asking:
    """Ask a model in this process, one block after the other."""
    return lambda blocks: (one for block in blocks for one in answers(lm, answerer, block))


def _failed(example: TaskExample, condition: Condition, error: RagWindowsError) -> Answered:
    return AnswerRecord(example.key, condition.name, "", error=str(error)), ()


@dataclass(frozen=True, slots=True)
class Run:
    """Has a task's examples answered, and stores the answers in a folder.

    All conditions answer an example before the next one is asked, so a condition finds in the
    model's cache what those before it encoded.
    """

    task: Task
    conditions: Sequence[Condition]
    ranking: Ranking
    folder: RunFolder
    asking: Asking
    batch: int = 1

    def answer(self, progress: Callable[[int, int], None]) -> list[AnswerRecord]:
        """Answer what the folder lacks, and store each answer at once; returns records of errors.

        An error of one question is stored as its record, and the next run asks it again. Errors of
        the whole run, such as a full disk, are raised, and all stored answers stay.
        """
        examples = self.task.examples
        total = len(examples) * len(self.conditions)
        done = sum(not self._lacks(each, one) for each in self.conditions for one in examples)
        progress(done, total)

        def keep(answered: Sequence[Answered]) -> None:
            nonlocal done
            self.folder.add(answered)
            done += len(answered)
            progress(done, total)

        for answered in self.asking(self._blocks(keep)):
            keep(answered)
        stored = self.folder.records
        records = [stored[each.name][one.key] for each in self.conditions for one in examples]
        return [one for one in records if one.error is not None]

    def _lacks(self, condition: Condition, example: TaskExample) -> bool:
        record = self.folder.records[condition.name].get(example.key)
        return record is None or record.error is not None

    def _blocks(self, keep: Callable[[Sequence[Answered]], None]) -> Iterator[Block]:
        """Blocks to be asked; examples whose passages can't be found are stored as errors."""
        for start in range(0, len(self.task.examples), self.batch):
            some = self.task.examples[start : start + self.batch]
            lacking = [
                (each, [one for one in some if self._lacks(each, one)]) for each in self.conditions
            ]
            ranked: dict[str, Sequence[Passage]] = {}
            for example in some:
                lack = [each for each, own in lacking if example in own]
                try:
                    if lack:
                        ranked[example.key] = self.ranking(example)
                except (ModelError, MissingExtraError):
                    raise
                except RagWindowsError as error:
                    keep([_failed(example, each, error) for each in lack])
            block = [
                (each, [(one, ranked[one.key][: each.top_k]) for one in own if one.key in ranked])
                for each, own in lacking
            ]
            if block := [(condition, asked) for condition, asked in block if asked]:
                yield block
