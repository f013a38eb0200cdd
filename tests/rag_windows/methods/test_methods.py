"""Methods: their numbers, names, JSON and table, and what each of them refuses."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rag_windows import (
    APE,
    METHODS,
    PCED,
    PCW,
    Aligned,
    Codebook,
    DeepThinking,
    InputError,
    LimitError,
    Linked,
    MateICL,
    Method,
    MethodError,
    ParallelEnsemble,
    PassageCache,
    QueryLikelihood,
    Sequential,
    StructuredPrompting,
    WindowedLM,
)
from rag_windows.methods import combination, composed, linked, registry
from rag_windows.methods.base import window_starts
from tests.rag_windows import small
from tests.test_repository import ROOT


def test_query_weights() -> None:
    weights = {"sqrt": 3.0, "log": 1 + math.log(9), "thirds": 4.0, "linear": 9.0, 2.5: 2.5}
    for schedule, weight in weights.items():
        assert MateICL(schedule).query_weight(9) == pytest.approx(weight)  # type: ignore[arg-type]  # looped over
        if isinstance(schedule, str):
            assert MateICL(schedule).query_weight(1) == 1.0  # type: ignore[arg-type]  # looped over


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (APE, {"scale": math.inf}, "APE scale must be a finite number above 0"),
        (APE, {"scale": "0.9"}, "APE scale must be a finite number above 0"),
        (APE, {"form": "as guessed"}, "as used"),
        *(
            (MateICL, {"schedule": one}, r"schedule must be one of \['sqrt', 'log'")
            for one in ("cube", -1.0, math.nan, True, None, [2.0])
        ),
        *((DeepThinking, {"steps": one}, "a whole number of passes") for one in (-1, 1.0, True)),
        (DeepThinking, {"eta": 1.01}, "eta must be above 0"),
        (DeepThinking, {"momentum": 1}, "at least 0, below 1"),
        (DeepThinking, {"positions": "behind"}, r"one of \['continue', 'reuse'\]"),
        (DeepThinking, {"reader": "ape"}, "must be a method such as APE"),
        (DeepThinking, {"reader": DeepThinking()}, "can't be combined with itself"),
        (DeepThinking, {"reader": Linked(2)}, r"with linked.*Linked\(reader=DeepThinking\(\)\)"),
        *(
            (Linked, {"tokens": one}, "is a usual start")
            for one in (-1, 1.0, 1.1, math.nan, "most", None, True)
        ),
        (Linked, {"choose": "middle"}, "'first', 'deviation', 'query', 'last'"),
        (Linked, {"reader": ParallelEnsemble()}, "ensemble.*alone"),
        (Linked, {"reader": StructuredPrompting()}, "structured-prompting.*mateicl"),
        (Linked, {"reader": Sequential()}, "sequential"),
        (Codebook, {"retrieve": 0}, "retrieve must be a number of passages above 0"),
        *((Codebook, {"layers": one}, "layers must be") for one in ((0.5,), (), [1])),
        (ParallelEnsemble, {"weights": "bm25"}, "uniform"),
        (ParallelEnsemble, {"score_temperature": 0}, "score_temp"),
        (ParallelEnsemble, {"beta": "much"}, "beta must be"),
        (ParallelEnsemble, {"nucleus": 1.5}, "nucleus must be"),
        *((PCED, {"beta": one}, "PCED beta must be") for one in (-0.1, math.inf, "much", True)),
        *((PCED, {"gamma": one}, "PCED gamma must be") for one in (-1, math.nan, None)),
        *((QueryLikelihood, {"retrieve": one}, "retrieve must be") for one in (0, 1.5, "all")),
        (QueryLikelihood, {"gamma": -1}, "gamma must be"),
        (QueryLikelihood, {"bridge": -1}, "bridge must be"),
        (QueryLikelihood, {"reader": StructuredPrompting()}, "structured-prompting.*use pcw"),
        (QueryLikelihood, {"reader": Linked(0.5)}, "linked.*use pcw"),
        (QueryLikelihood, {"reader": Codebook()}, "codebook: both choose"),
    ],
)
def test_numbers_and_readers_outside_the_domain_are_refused(
    kind: type[Method], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(MethodError, match=message):
        kind(**wrong)


@pytest.mark.parametrize("weight", [0.0, -2.0, math.inf, math.nan, "2"])
def test_a_function_that_gives_no_weight_is_refused(weight: Any) -> None:
    given = MateICL(lambda windows: weight)
    with pytest.raises(MethodError, match=r"mateicl gives the query the weight .* for 3 windows"):
        small.lm().generate("Why?", ["One.", "Two.", "Three."], method=given)


@dataclass(frozen=True, slots=True)
class Wrapper(composed.Composed):
    """Changes nothing."""

    steps: int = 2

    name: ClassVar[str] = "wrapper"
    formula: ClassVar[str] = "-"
    paper: ClassVar[str] = "-"


def test_aligned_windows_end_together_wherever_others_do() -> None:
    assert window_starts(8, 5, (8, 3, 9), ()) == [5, 10, 12]
    assert window_starts(8, 5, (3, 3), (0, 6)) == [10, 18]
    for reader in ("pced", "linked", "sequential"):
        with pytest.raises(MethodError, match="aligned can't be combined with"):
            registry.resolve(f"aligned+{reader}")
    with pytest.raises(MethodError, match="a number of tokens above 0"):
        Aligned(0)
    assert registry.describe(registry.resolve("aligned+ape"))["tokens"] == 512


def test_multiples_that_the_model_has_no_positions_for_are_refused() -> None:
    beyond = f"aligned:tokens={small.POSITIONS}+ape"
    for words in (1, 20, 60):
        asked: dict[str, Any] = {
            "query": "Why?",
            "passages": ["It is. " * words, "No."],
            "max_new_tokens": 2,
        }
        with pytest.raises(LimitError, match="smaller multiple"):
            small.lm().generate(**asked, method=beyond)
    lm = WindowedLM(small.model(), small.tokenizer(), method=beyond, cache=PassageCache("1MB"))
    with pytest.raises(InputError, match="smaller multiple"):
        lm.warm(["It is."])


def test_methods_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "METHODS", {**METHODS, "wrapper": Wrapper})
    resolve = registry.resolve
    method = APE(0.5, 0.5)
    assert resolve(method) is method
    assert resolve("APE") == APE()
    assert resolve("wrapper+ape") == resolve(" Wrapper + APE ") == Wrapper(reader=APE())
    assert resolve("wrapper") == Wrapper(reader=PCW())
    assert resolve("ape:scale=1e+0,form=as printed") == APE(0.9, 1.0, "as printed")
    assert resolve("codebook:size=none").size is None  # type: ignore[attr-defined]  # a Codebook
    assert registry.names_in("pcw, ape:scale=1,form=as used") == ["pcw", "ape:scale=1,form=as used"]
    for name, message in {
        "ape+pcw": r"ape\+pcw' is not a valid combination: ape reads windows itself.*'wrapper'",
        "wrapper+apex": r"Unknown method 'apex' in",
        "wrapper+": "Unknown method ''",
        "wrapper+sequential": "wrapper can't be combined with sequential",
        **dict.fromkeys(
            ("ape:temperature=1.0:scale=1.0", "ape:scale=1=2", "ape:scale=1,scale=2", "ape:1:1"),
            "is not a parameter.* with commas between them, as in ape:temperature=0.9,scale=0.9",
        ),
        **dict.fromkeys(("ape:", "ape:0.9"), "each parameter once as name=value"),
        "ape:scale=warm": "'warm'",
        "deep-thinking:reader=ape": r"by name, 'deep-thinking\+ape'",
        "pcw:scale=1": r"The method 'pcw' has no parameter 'scale' \(it has none\).*such as 'ape'",
        "atuo": "Unknown method 'atuo'. Did you mean 'auto'",
        "auto:retreive=3": r"no parameter 'retreive' \(it has chunks, retrieve,.*mean 'retrieve'",
        "auto:retrieve=3+ape": "The method 'auto' has no parameter 'retrieve'",
    }.items():
        with pytest.raises(MethodError, match=message):
            resolve(name)


@pytest.mark.parametrize("name", METHODS)
def test_methods_as_json_and_back(name: str) -> None:
    method = METHODS[name]()
    assert (method.name, bool(method.formula and method.paper)) == (name, True)
    written = json.loads(json.dumps(registry.describe(method)))
    assert written["name"] == name
    assert registry.resolve(written) == registry.resolve(name) == method


def test_descriptions_that_are_unknown_are_refused() -> None:
    for value, message in (
        ({"schedule": 2}, "Unknown method None"),
        ({"name": "ape", "steps": 2}, "has no parameter 'steps'"),
        (7, "Unknown method 7"),
    ):
        with pytest.raises(MethodError, match=message):
            registry.resolve(value)  # type: ignore[arg-type]  # one of them is no description


def test_parameters_of_a_method_and_its_readers() -> None:
    method = Linked(4, reader=DeepThinking(steps=3, reader=APE(0.8, 0.7)))
    changed = registry.with_parameters(method, {"tokens": 8, "scale": 1.0})
    assert changed == Linked(8, reader=DeepThinking(steps=3, reader=APE(0.8, 1.0)))
    for values in ({"temperature": -1.0}, {"schedule": 2}):
        with pytest.raises(MethodError):
            registry.with_parameters(method, values)
    found = registry.numbers_of(method)
    assert (found["tokens"], found["steps"], found["temperature"]) == (4, 3, 0.8)
    assert registry.with_parameters(method, found) == method


@pytest.mark.parametrize(
    "text",
    [
        *(name for name in METHODS),
        *("ape:temperature=0.8", "query-likelihood:retrieve=2+sequential", "auto:chunks=0"),
        *("auto:retrieve=3", "auto:chunks=2,retrieve=4,bridge=0.0", "auto+ape", "aligned+ape"),
        *("deep-thinking:steps=3+ape:scale=0.123456789", "codebook:size=None,retrieve=2"),
    ],
)
def test_a_method_is_spelled_as_it_is_named(text: str) -> None:
    method = registry.resolve(text)
    assert registry.resolve(registry.spelled(method)) == method
    assert registry.spelled(method) == text.replace("size=None,", "")


def test_the_page_shows_every_method_as_the_command_line_does() -> None:
    text = (ROOT / "docs" / "which_method.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- methods -->\n")[2].partition("<!-- /methods -->")[0]
    rows = registry.method_rows()
    for row, said in zip(rows, re.split(r"^- ", shown, flags=re.MULTILINE)[1:], strict=True):
        facts = [f"**`{row['name']}`**: {row['summary']}", f"Formula: `{row['formula']}`."]
        if row["parameters"]:
            facts.append(f"Parameters: `{registry.settings_of(row)}`.")
        if row["paper"] != "-":
            paper = re.sub(r"arXiv:([\w.]+)", r"[\1](https://arxiv.org/abs/\1)", row["paper"])
            facts.append(f"Paper: {paper}.")
        assert [line.strip() for line in said.splitlines()][: len(facts)] == facts


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [(0, [0, 0, 0]), (5, [5, 3, 5]), (0.15, [3, 1, 2]), (0.99, [20, 3, 9]), ("all", [20, 3, 9])],
)
def test_how_many_tokens_are_linked(tokens: Any, counts: list[int]) -> None:
    lengths = [20, 3, 9]
    plan = Linked(tokens)
    assert plan.counts(lengths) == counts
    assert (plan.recompute is None) == (sum(counts) == 0)
    assert plan.everything(lengths) == (counts == lengths)
    assert linked(APE(), tokens) == Linked(tokens, reader=APE())
    assert linked(Sequential(), tokens) == Sequential()
    assert linked(APE(), None) == APE()
    with pytest.raises(MethodError):
        linked(Sequential(), -5)


def test_every_number_of_a_refinement_is_part_of_the_encoding() -> None:
    variants = [
        PCW(),
        DeepThinking(),
        DeepThinking(steps=6),
        DeepThinking(eta=0.02),
        DeepThinking(momentum=0.0),
        DeepThinking(positions="reuse"),
    ]
    assert len({method.encoding for method in variants}) == len(variants)
    assert DeepThinking(eta=1).encoding == DeepThinking(eta=1.0).encoding
    assert DeepThinking(reader=APE(0.5, 0.5)).encoding == DeepThinking().encoding
    assert (DeepThinking(0).encoding, DeepThinking(0).refinement) == (PCW().encoding, None)


def logs(*rows: list[float]) -> torch.Tensor:
    """(1, windows, 1, vocabulary) log-probabilities."""
    return torch.tensor(rows).log()[None, :, None]


HALF = [0.5, 0.5, 0.0, 0.0]
RETRIEVAL = ParallelEnsemble(weights="retrieval")


def test_retrieval_weighs_passages_and_not_their_windows() -> None:
    pooling = ParallelEnsemble(weights="retrieval", score_temperature=0.5)
    fixed = pooling.fixed([1.0, 2.0, 2.0, 0.5], [0, 1, 1, 2])
    assert fixed is not None
    passages = torch.softmax(torch.tensor([2.0, 4.0, 1.0]), dim=0)
    expected = [passages[0], passages[1] / 2, passages[1] / 2, passages[2]]
    assert fixed.tolist() == pytest.approx([float(x) for x in expected])
    far_apart = RETRIEVAL.fixed([-1e6, 0.0, 1e6], [0, 1, 2])
    assert far_apart is not None
    assert far_apart.tolist() == [0.0, 0.0, 1.0]
    impossible = logs([0.0, 1.0], [0.5, 0.5], [0.25, 0.75])
    combined, weights = RETRIEVAL.combine(combination.RowLogits(impossible, fixed=far_apart))
    assert weights.flatten().tolist() == [0.0, 0.0, 1.0]
    assert combined.exp().flatten().tolist() == pytest.approx([0.25, 0.75])


def test_what_no_window_can_say_stays_finite() -> None:
    whole = ParallelEnsemble(beta=0.5, nucleus=1)
    windows, prior = logs([1.0, 0.0, 0.0, 0.0], HALF), logs([0.0, 0.0, 0.0, 1.0])[:, 0]
    found, _ = whole.combine(combination.RowLogits(windows, prior, torch.full((2,), 0.5)))
    assert torch.isfinite(found).all()
    assert found.exp().sum().item() == pytest.approx(1)
    sure = logs([1.0, 0.0, 0.0, 0.0], [0.25] * 4)
    weights = ParallelEnsemble(weights="entropy").weigh(sure, None).flatten()
    assert weights.tolist() == pytest.approx([0.9993, 0.0007], abs=1e-4)
    assert not ParallelEnsemble().prior
    assert ParallelEnsemble(weights="entropy").correction == 0.25
    assert not ParallelEnsemble(weights="entropy", beta=0).prior


def bring(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Install a distribution that brings a method."""
    about = folder / "brought-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[rag_windows.methods]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(folder)


def test_another_distribution_brings_a_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "brought" not in {row["name"] for row in registry.method_rows()}
    with pytest.raises(MethodError, match="Unknown method 'brought'"):
        registry.resolve("brought")
    (tmp_path / "brought_method.py").write_text(
        "from dataclasses import dataclass\n"
        "from rag_windows import PCW\n\n"
        "@dataclass(frozen=True, slots=True)\n"
        "class Brought(PCW):\n"
        "    loud: int = 1\n    name = 'brought'\n"
    )
    bring(tmp_path, monkeypatch, "brought", "brought_method:Brought")
    one = registry.resolve("brought:loud=3")
    assert (one.name, registry.describe(one)) == ("brought", {"name": "brought", "loud": 3})
    text = "deep-thinking+brought:loud=2"
    assert registry.spelled(registry.resolve(text)) == text
    assert "brought" in {row["name"] for row in registry.method_rows()}
    with pytest.raises(MethodError, match="choose a method that has it, such as 'brought'"):
        registry.resolve("pcw:loud=3")


@pytest.mark.parametrize("value", ["json:dumps", "rag_windows:PCW", "rag_windows:__all__"])
def test_what_is_no_method_of_its_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    bring(tmp_path, monkeypatch, "brought", value)
    with pytest.raises(MethodError, match=f"'brought' of the group .*, '{value}', is not a Method"):
        registry.resolve("brought")
    assert registry.resolve("pcw") == PCW()
