"""`lm.compare`, its examples, and the profile that it gives."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_windows import (
    APE,
    METHODS,
    PCW,
    Codebook,
    DeepThinking,
    Example,
    InputError,
    Linked,
    MateICL,
    Method,
    MethodError,
    MissingExtraError,
    Neighbours,
    Passage,
    PassageCache,
    Profile,
    ProfileError,
    Sequential,
    WindowedLM,
    calibration,
    with_neighbours,
)
from tests.drawn import questions
from tests.rag_windows import small

WORDS = "tower river bridge lamp stone field quiet green seven door".split()
GRID = (APE(0.7, 0.9), APE(1.0, 1.0), APE(0.9, 0.6))
QUICK: dict[str, Any] = {"methods": GRID, "max_new_tokens": 4, "refine": False}


def examples(count: int = 8, *, labelled: bool = False, each: int = 3) -> list[Example]:
    rng = random.Random(7)
    made = []
    for number in range(count):
        passages = [
            Passage(" ".join(rng.choices(WORDS, k=4)), id=f"{number}-{index}", score=float(index))
            for index in range(each)
        ]
        answer = rng.choice(WORDS) if labelled else None
        made.append(Example(f"Which {rng.choice(WORDS)}?", passages, answer))
    return made


def compare(some: Sequence[Any], **options: Any) -> Profile:
    return small.lm().compare(some, **{**QUICK, **options})


def windows_asked_for(**options: Any) -> int:
    """How often a comparison looks for a window in its cache."""
    cache = PassageCache(memory="16MiB")
    lm = small.wrapped(cache=cache)
    # Of so many, the two that "auto" reads are not what one prompt reads.
    lm.compare(examples(each=8), **{**QUICK, **options})
    found = cache.stats().tiers["memory"]
    return found.hits + found.misses


@pytest.mark.slow
def test_settings_share_windows_as_long_as_they_are_kept() -> None:
    once = windows_asked_for()
    assert windows_asked_for(refine=True) == once
    assert windows_asked_for(refine=True, keep_bytes=0) == 2 * once
    steps = [DeepThinking(steps=1, reader=APE(T, 0.9)) for T in (0.8, 0.9)]
    assert once < windows_asked_for(methods=[APE(0.7, 0.9), *steps]) <= 2 * once


@pytest.mark.slow
def test_chunks_are_encoded_as_each_method_does_it() -> None:
    given = [
        replace(one, passages=with_neighbours([replace(p, document="d", index=i) for i, p in each]))
        for one in examples()
        for each in [list(enumerate(map(Passage.of, one.passages)))]
    ]
    methods = (PCW(), Neighbours(reader=PCW()), Neighbours(1, reader=PCW()))
    together = compare(given, methods=["pcw", "neighbours+pcw", "neighbours:chunks=1+pcw"])
    for method in methods:
        alone = compare(given, methods=[method]).setting(method)
        assert together.setting(method).figures == alone.figures
    values = {together.setting(one).figures["divergence"].value for one in methods}
    assert len(values) == 3


@pytest.mark.parametrize("by", ["labels", "agreement"])
def test_figures_are_those_of_the_distributions(by: Any) -> None:
    lm, method = small.lm(), APE(0.7, 0.8)
    given = examples(labelled=True)
    options: dict[str, Any] = {"refine": False, "max_new_tokens": 3, "prefix": "Hm.", "by": by}
    made = lm.compare(given, methods=[method], **options)
    found: dict[str, list[float]] = {}
    for one in given:
        parts = lm.engine.text.prompt.build(
            one.query, [Passage.of(passage) for passage in one.passages], prefix="Hm."
        )
        windows = [list(window.ids) for window in parts.windows]
        query = list(parts.query_ids)
        contexts: Any = {
            how: lm.encode_ids(parts.prefix_ids, windows, method=how)
            for how in ("sequential", method)
        }

        def along(how: str | Method, ids: list[int], query: Any = query, of: Any = contexts) -> Any:
            return lm.logits(of[how], [*query, *ids])[len(query) - 1 : -1].log_softmax(-1)

        figures: dict[str, float]
        if by == "labels":
            assert one.answer is not None
            gold = [*lm.engine.text.prompt.encode_text(one.answers[0], continuation=True), 1]
            rows = along(method, gold)
            total = sum(rows[place, id] for place, id in enumerate(gold))
            said = lm.generate_ids(contexts[method], query, max_new_tokens=3)
            right = calibration.contains(lm.tokenizer.decode(said), one.answers[0])
            figures = {"contains": right, "log-probability": float(total)}
        else:
            answer = lm.generate_ids(contexts["sequential"], query, max_new_tokens=3)
            reference, candidate = along("sequential", answer), along(method, answer)
            kl = torch.nn.functional.kl_div(candidate, reference, reduction="sum", log_target=True)
            same = candidate.argmax(-1).tolist() == answer
            figures = {"divergence": float(kl) / 3, "agreement": same}
        for name, value in figures.items():
            found.setdefault(name, []).append(float(value))
    measured = made.setting(method).figures
    assert {name: one.value for name, one in measured.items()} == pytest.approx(
        {name: float(np.mean(values)) for name, values in found.items()}, rel=1e-4
    )


SETTINGS: dict[str, Sequence[Method]] = {
    "mateicl": (MateICL(2.0), MateICL(3.0)),
    "codebook": (Codebook(retrieve=1), Codebook(retrieve=2)),
    "deep-thinking": (DeepThinking(steps=1), DeepThinking(steps=2)),
    "linked": (Linked(1), Linked(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"sequential"}))
def test_every_method_can_be_compared(name: str) -> None:
    settings = SETTINGS.get(name, ())
    tried = ["pcw", METHODS[name](), *settings]
    made = compare(examples(), methods=tried, refine=name == "deep-thinking")
    assert len({row.method for row in made.settings}) >= 1 + len(settings)
    assert all(0 <= row.figures["divergence"].value < 50 for row in made.settings)
    if settings:
        values = {round(row.figures["divergence"].value, 7) for row in made.settings}
        assert len(values) > 1


@pytest.mark.slow
def test_labels_decide_where_all_examples_have_them() -> None:
    labelled = examples(labelled=True)
    assert compare(labelled).criteria == ("contains", "log-probability")
    assert compare(labelled, by="agreement").criteria == ("divergence",)
    mixed = [*labelled, *examples(2)]
    assert compare(mixed).criteria == ("divergence",)
    by_labels = compare(mixed, by="labels")
    assert (by_labels.examples, by_labels.criteria[0]) == (8, "contains")


@pytest.mark.slow
def test_a_metric_judges_generated_answers() -> None:
    heard: list[tuple[str, str]] = []

    def metric(prediction: str, answer: str) -> float:
        heard.append((prediction, answer))
        return float(len(prediction))

    labelled = examples(labelled=True)
    made = compare(labelled, metric=metric)
    texts = {
        small.lm()
        .generate(one.query, one.passages, method=method, max_new_tokens=4, do_sample=False)
        .text.strip()
        for one in labelled
        for method in ("sequential", *GRID)
    }
    assert {prediction for prediction, _ in heard} == texts
    assert {answer for _, answer in heard} == {one.answer for one in labelled}
    assert made.criteria == ("metric", "log-probability")
    with pytest.raises(InputError, match="metric= compares answers with right ones"):
        compare(examples(), metric=metric)


def test_what_does_not_fit_is_left_out_and_told() -> None:
    long = [Passage("stone " * 60 + str(number)) for number in range(3)]
    given = [*examples(), Example("Which?", long), Example("Who?")]
    made = compare(given)
    assert made.examples == 8
    first, second = made.left_out
    assert first.startswith("Example 9 was left out: The passages do not fit the model")
    assert "Passage 2 has 363 tokens" in first
    assert second == "Example 10 was left out: it has no passages."
    labelled = compare([*examples(labelled=True), Example("Which?", long, "stone")])
    assert (labelled.examples, len(labelled.left_out)) == (8, 1)


def test_few_examples_and_wrong_settings_are_refused() -> None:
    with pytest.raises(InputError, match=r"got 7\. .*Example 1 was left out: it has no passages"):
        compare([Example("Who?"), *examples(7)])
    with pytest.raises(InputError, match="at least 8 labelled examples"):
        compare(examples(), by="labels")
    for given, by in ((["sequential"], "labels"), (["auto", "sequential"], "agreement")):
        with pytest.raises(InputError, match=r"nothing to compare .* with\. Name other methods"):
            compare(examples(labelled=True), methods=given, by=by)
    with pytest.raises(MethodError, match="Unknown method 'magic'"):
        compare(examples(), methods=["magic"])
    with pytest.raises(InputError, match="'pcw' has no numbers to choose"):
        compare(examples(), grid="pcw")
    with pytest.raises(InputError, match="by must be"):
        compare(examples(), by="luck")
    with pytest.raises(InputError, match="must be an Example"):
        compare(["Who?"] * 8)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_profile_whatever_is_kept_or_cached() -> None:
    one, other = compare(examples()), compare(examples(), seed=1)
    mappings = [{"query": e.query, "passages": list(e.passages)} for e in examples()]
    assert compare(mappings) == compare(examples(), keep_bytes=0) == one
    assert other.settings[0].figures != one.settings[0].figures
    cached = small.wrapped(cache=PassageCache(memory="16MiB"))
    assert cached.compare(examples(), **QUICK) == one
    out = cached.generate("Which door?", examples()[0].passages, max_new_tokens=2)
    assert out.usage.cached_tokens > 0


def test_progress_is_told_to_its_end() -> None:
    told: list[tuple[str, int, int | None]] = []
    compare(examples(), on_progress=lambda *one: told.append(one))
    assert list(dict.fromkeys(what for what, _, _ in told)) == [
        "Reading the examples",
        "Trying settings",
    ]
    assert told[-1] == ("Trying settings", 32, 32)


def interrupting(what: str, after: int) -> Any:
    """An `on_progress` that is interrupted once so much of a step is done."""

    def on_progress(step: str, done: int, whole: int) -> None:
        if step == what and done == after:
            raise KeyboardInterrupt

    return on_progress


@pytest.mark.slow
def test_an_interruption_keeps_what_every_method_has_answered() -> None:
    given = examples(12, labelled=True)
    given[9] = replace(given[9], passages=[*given[9].passages, "stone field " * 10])
    # In the middle of the tenth example, of four settings each.
    stopped = compare(given, on_progress=interrupting("Trying settings", 9 * 4 + 2), refine=True)
    whole = compare(given[:9])
    assert (stopped.interrupted, whole.interrupted) == (True, False)
    assert stopped.left_out == (
        "9 of 12 examples were asked, because the comparison was interrupted.",
    )
    assert "9 questions" in stopped.verdict
    costs = [[one.cost.tokens for one in made.settings] for made in (stopped, whole)]
    assert costs[0] == costs[1]
    assert replace(stopped, left_out=(), interrupted=False, verdict=whole.verdict) == whole


def test_an_interruption_inside_an_answer_keeps_the_same() -> None:
    judged: list[str] = []

    def metric(prediction: str, answer: str) -> float:
        judged.append(answer)
        if len(judged) == 8 * 2 + 2:
            raise KeyboardInterrupt
        return float(len(prediction))

    made = compare(examples(12, labelled=True), metric=metric, methods=["pcw"], max_new_tokens=1)
    assert (made.examples, made.interrupted) == (8, True)


@pytest.mark.slow
def test_an_interruption_of_the_second_round_keeps_the_first() -> None:
    given = examples(each=8)
    rounds: list[int] = []

    def on_progress(step: str, done: int, whole: int) -> None:
        if step == "Trying settings" and done == 0:
            rounds.append(whole)
        if len(rounds) == 2 and done == 1:
            raise KeyboardInterrupt

    made = compare(given, on_progress=on_progress, refine=True)
    assert rounds[1] > 0
    assert made.left_out == (
        "Finer settings were left out, because the comparison was interrupted.",
    )
    whole = compare(given)
    # The verdict has seconds as well.
    assert replace(made, left_out=(), interrupted=False, verdict=whole.verdict) == whole


@pytest.mark.parametrize("after", [0, 8 * 2 - 1])
def test_an_interruption_before_there_is_a_profile_is_raised(after: int) -> None:
    shortest: dict[str, Any] = {"methods": ["pcw"], "max_new_tokens": 1}
    with pytest.raises(KeyboardInterrupt):
        compare(examples(9), on_progress=interrupting("Trying settings", after), **shortest)
    with pytest.raises(KeyboardInterrupt):
        compare(examples(9), on_progress=interrupting("Reading the examples", 8), **shortest)


@pytest.mark.slow
def test_what_one_prompt_answers_worse_is_told(reader: WindowedLM) -> None:
    """The shipped model was trained on 8 passages in one prompt, and reads more of them apart."""
    drawn = questions("96 passages")
    given = [Example(one.question, one.passages, one.answer) for one in drawn]
    made = reader.compare(given, ["pcw", "ape"], max_new_tokens=12)
    assert made.base == Sequential()
    assert made.method == made.best in (APE(), PCW())
    assert made.held_out[0].better
    assert "judged on the rest: they had " in made.verdict
    assert "includes 0" not in made.verdict
    assert made.setting(made.method).figures["contains"].value > 0.8
    costs = [made.setting(one).cost for one in (made.base, made.method)]
    assert [one.tokens == 0 for one in costs] == [False, True]
    assert costs[0].cold_s == costs[0].warm_s
    assert (costs[1].warm_s or 0) < (costs[1].cold_s or 0)
    # What is measured is what is generated.
    right = [
        reader.generate(
            one.query, one.passages, method=made.method, max_new_tokens=12, do_sample=False
        ).text.strip()
        == one.answer
        for one in given
    ]
    assert made.setting(made.method).figures["contains"].value == np.mean(right)


def test_mappings_and_lines_of_a_file_are_examples(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"query": "Who?\u2028Now.", "passages": ["One.", {"text": "Two.", "id": "2"}]},
        {"question": "Where?", "answer": "There", "kind": "multi-hop"},
        {"query": [{"role": "user", "content": "When?"}], "passages": ["Then."]},
    ]
    path = tmp_path / "examples.jsonl"
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(lines + '\n{"query": "half \\ud83d"}\n', encoding="utf-8")
    first, second, third, fourth = calibration.read_examples(path)
    assert first == Example("Who?\u2028Now.", (Passage("One."), Passage("Two.", id="2")))
    assert second == Example.of(Example("Where?", (), "There", "multi-hop"))
    assert third.query == [{"role": "user", "content": "When?"}]
    assert fourth.query == "half \ufffd"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"query": "a"}\n{"query"', "line 2 is not valid JSON at character 9: Expecting.*such as"),
        ('{"query": "a", "query": "b"}', "line 1 must be a line such as .*appears twice"),
        ('\n{"passages": []}', "line 2 .*must have a 'query'"),
        ('{"query": "a", "passage": []}', "line 1 .*has the unknown key 'passage'. Use question"),
        ('{"query": "a", "answer": 3}', "line 1 .*not blank, not 3"),
        ("\n \n", "has no lines. Write lines such as"),
        (None, "can't be read"),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=message):
        calibration.read_examples(path)


def mean(value: float) -> calibration.Mean:
    return calibration.Mean(value, value - 0.1, value + 0.1)


def setting(method: Method, divergence: float, *, fine: bool = False) -> calibration.Setting:
    return calibration.Setting(
        method, {"divergence": mean(divergence), "agreement": mean(1 - divergence)}, fine
    )


def profile() -> Profile:
    """One made by hand."""
    settings = [
        setting(APE(T, S), 0.3 + abs(T - S) + (1 - T) / 10)
        for T in (0.5, 0.9, 1.0)
        for S in (0.5, 0.9, 1.0)
    ]
    settings.append(setting(APE(0.95, 0.949), 0.2, fine=True))
    comparison = calibration.Comparison("divergence", mean(0.2), mean(0.3), mean(0.11))
    return Profile(
        method=APE(0.95, 0.949),
        best=APE(0.95, 0.949),
        base=APE(),
        verdict="It does.",
        criteria=("divergence",),
        settings=tuple(settings),
        held_out=(comparison,),
        examples=12,
        folds=4,
        seed=3,
        left_out=("Example 1 was left out: it has no passages.",),
        model=calibration.ModelFingerprint("some/model", "ab" * 32),
    )


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for made in (profile(), compare(examples(labelled=True))):
        made.save(path)
        assert Profile.load(path) == made == Profile.of(str(path))
    profile().save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]
    data = json.loads(path.read_text())
    assert data["method"] == {"name": "ape", "temperature": 0.95, "scale": 0.949, "form": "as used"}
    assert (data["version"], data["model"]["name"]) == (2, "some/model")
    assert data.keys() == {
        *("format", "version", "model", "method", "best", "base", "verdict", "criteria"),
        *("examples", "folds", "seed", "left_out", "held_out", "settings", "interrupted"),
    }
    assert data["held_out"][0].keys() == {"figure", "chosen", "base", "difference"}
    assert data["settings"][0]["cost"].keys() == {"cold_s", "warm_s", "tokens"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "is not a rag-windows calibration profile of version 2, .* again"),
        ({"method": {"name": "ape", "scale": -1}}, "entry 'method': .*APE scale must be"),
        ({"best": 5}, "entry 'best': .*Unknown method 5"),
        ({"criteria": ["beauty"]}, r"entry 'criteria.0': .*'divergence'"),
        ({"criteria": ["metric"]}, r"have no figures for the criteria .*'metric'"),
    ],
)
def test_a_damaged_profile_is_told(tmp_path: Path, changes: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(profile().to_json()), **changes}))
    with pytest.raises(ProfileError, match=message) as error:
        Profile.load(path)
    assert str(error.value).startswith(f"The profile {str(path)!r} can't be used: ")


def test_files_that_are_none_or_can_not_be_written_are_told(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"can't be used: .*No such file.*rag-windows compare"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="can't be written"):
        profile().save(tmp_path / "no" / "folder.json")
    with pytest.raises(ProfileError, match="must be a Profile or the path of one, not 3"):
        Profile.of(3)  # type: ignore[arg-type] # that is the point
    unnamed = dataclasses.replace(profile(), method=MateICL(lambda windows: 2.0))
    with pytest.raises(ProfileError, match="numbers and text as parameters"):
        unnamed.save(tmp_path / "profile.json")


def test_rows_are_found_ranked_and_named() -> None:
    made = profile()
    assert made.ranked()[0].method == made.best
    assert made.setting(APE()).figures["agreement"].value == pytest.approx(0.69)
    for method, told in (
        (MateICL("log"), "mateicl:schedule=log"),
        (DeepThinking(reader=APE()), r"deep-thinking\+ape"),
    ):
        with pytest.raises(ProfileError, match=f"no setting .*{told}"):
            made.setting(method)


def stamped() -> Profile:
    return dataclasses.replace(profile(), model=calibration.ModelFingerprint.of(small.model()))


def test_another_model_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="made for 'LlamaForCausalLM' .* Compare again") as told:
        WindowedLM.from_pretrained(small.model(1), tokenizer=small.tokenizer(), profile=stamped())
    assert len(told) == 1


def test_a_fingerprint_tells_weights_and_precisions_apart() -> None:
    one = calibration.ModelFingerprint.of(small.model())
    again = copy.deepcopy(small.model())
    again.config.transformers_version = "9.9.9"
    assert calibration.ModelFingerprint.of(again) == one
    assert calibration.ModelFingerprint.of(small.model(1)).fingerprint != one.fingerprint
    half = copy.deepcopy(small.model()).bfloat16()
    assert calibration.ModelFingerprint.of(half).fingerprint != one.fingerprint


def test_settings_are_drawn(tmp_path: Path) -> None:
    def varied(*methods: Method) -> Profile:
        settings = tuple(setting(one, 0.3) for one in methods)
        return dataclasses.replace(
            profile(), settings=settings, base=methods[0], best=methods[-1], method=methods[-1]
        )

    schedules = (MateICL(), MateICL(1.0), MateICL(2.0))
    deep = (DeepThinking(steps=n, eta=0.1 / n, momentum=0.5 / n) for n in (1, 2, 3))
    for made in (profile(), varied(*schedules), varied(*deep)):
        made.plot(tmp_path / "made.png")
        data = (tmp_path / "made.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert min(struct.unpack(">II", data[16:24])) > 600
    with pytest.raises(ProfileError, match="There is nothing to draw"):
        varied(MateICL(), MateICL("log")).plot(tmp_path / "x")
    with pytest.raises(ProfileError, match="can't be written"):
        profile().plot(tmp_path / "no" / "folder.png")


def test_matplotlib_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "rag-windows\[figures\]"'):
        profile().plot(tmp_path / "heat.png")
