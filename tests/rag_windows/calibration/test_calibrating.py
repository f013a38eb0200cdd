from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rag_windows import APE, METHODS, Passage, WindowedLM
from rag_windows.calibration import Example, Profile
from rag_windows.calibration.contexts import Contexts
from rag_windows.calibration.measuring import Measuring
from rag_windows.calibration.prepared import prepare
from rag_windows.errors import InputError, MethodError
from rag_windows.guard import Guard, mass_spread
from rag_windows.methods import Codebook, DeepThinking, Linked, MateICL, Method
from rag_windows.prefill import Encoder
from tests.rag_windows import small

WORDS = "tower river bridge lamp stone field quiet green seven door".split()
GRID = (APE(0.7, 0.9), APE(1.0, 1.0), APE(0.9, 0.6))
QUICK: dict[str, Any] = {"settings": GRID, "max_new_tokens": 4, "refine": False}


def examples(count: int = 8, *, labelled: bool = False, kinds: bool = False) -> list[Example]:
    rng = random.Random(7)
    made = []
    for number in range(count):
        passages = [
            Passage(" ".join(rng.choices(WORDS, k=4)), id=f"{number}-{index}", score=float(index))
            for index in range(3)
        ]
        kind = "multi-hop" if number % 2 else "single-hop"
        answer = rng.choice(WORDS) if labelled else None
        made.append(
            Example(f"Which {rng.choice(WORDS)}?", passages, answer, kind if kinds else None)
        )
    return made


def calibrate(some: Sequence[Any], **options: Any) -> Profile:
    return small.lm().calibrate(some, **{**QUICK, **options})


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Windows of each call of the encoder, passages read one after the other left out."""
    small.lm()  # loading tries the encoder, too
    calls: list[int] = []
    prefill = Encoder.prefill

    def spy(self: Encoder, prefix: Any, windows: Any, method: Method, *args: Any, **kw: Any) -> Any:
        if method.windowed:
            calls.append(len(windows))
        return prefill(self, prefix, windows, method, *args, **kw)

    monkeypatch.setattr(Encoder, "prefill", spy)
    return calls


def test_all_settings_share_windows_that_are_encoded_once(encoded: list[int]) -> None:
    profile = calibrate(examples(), refine=True)
    assert len(profile.settings) > len(GRID) + 1
    assert encoded == [3] * 8


def test_windows_that_do_not_fit_are_encoded_once_a_round(encoded: list[int]) -> None:
    profile = calibrate(examples(), refine=True, keep_bytes=0)
    assert encoded == [3] * 16
    assert profile == calibrate(examples(), refine=True)


def test_settings_of_another_encoding_are_encoded_for_themselves(encoded: list[int]) -> None:
    steps = [DeepThinking(steps=1, reader=APE(T, 0.9)) for T in (0.8, 0.9)]
    calibrate(examples(), settings=[APE(0.7, 0.9), *steps])
    assert encoded == [3] * 16


def test_figures_are_those_of_the_distributions() -> None:
    lm, method = small.lm(), APE(0.7, 0.8)
    one = examples(labelled=True)[0]
    (ready,), _ = prepare(
        lm.engine,
        [one],
        [method],
        prefix="Be brief.",
        max_new_tokens=3,
        need_reference=False,
        on_progress=lambda *_: None,
    )
    measuring = Measuring(
        lm.engine,
        [ready],
        Contexts(lm.engine),
        metric=None,
        max_new_tokens=3,
        on_progress=lambda *_: None,
    )
    measuring.run([method], "")
    found = {name: rows[method][0] for name, rows in measuring.table.items()}

    parts = lm.engine.text.prompt.build(
        one.query, [Passage.of(passage) for passage in one.passages], prefix="Be brief."
    )
    windows = [list(window.ids) for window in parts.windows]
    query = list(parts.query_ids)

    def along(how: str | Method, ids: list[int]) -> torch.Tensor:
        context = lm.encode_ids(parts.prefix_ids, windows, method=how)
        return lm.logits(context, [*query, *ids])[len(query) - 1 : -1].log_softmax(-1)

    sequential = lm.encode_ids(parts.prefix_ids, windows, method="sequential")
    answer = lm.generate_ids(sequential, query, max_new_tokens=3)
    reference, candidate = along("sequential", answer), along(method, answer)
    kl = torch.nn.functional.kl_div(candidate, reference, reduction="sum", log_target=True)
    assert found["divergence"] == pytest.approx(float(kl) / 3, rel=1e-4)
    assert found["agreement"] == float(candidate.argmax(-1).tolist() == answer)
    assert one.answer is not None
    gold = [*lm.engine.text.prompt.encode_text(one.answer, continuation=True), 1]
    rows = along(method, gold)
    total = float(sum(rows[place, token] for place, token in enumerate(gold)))
    assert found["log-probability"] == pytest.approx(total, rel=1e-4)
    assert found["exact match"] == float(rows.argmax(-1).tolist() == gold)


def test_the_sequential_reader_agrees_with_itself() -> None:
    alone = [Example(one.query, one.passages[:1]) for one in examples()]
    profile = calibrate(alone, settings=[APE(1.0, 1.0)])
    row = profile.setting(APE(1.0, 1.0))
    assert row.figures["divergence"].value == pytest.approx(0, abs=1e-5)
    assert row.figures["agreement"].value == 1.0
    assert profile.method == APE(1.0, 1.0)
    assert profile.beats_default


SETTINGS: dict[str, Sequence[Method]] = {
    "mateicl": (MateICL(2.0), MateICL(3.0)),
    "codebook": (Codebook(retrieve=1), Codebook(retrieve=2)),
    "deep-thinking": (DeepThinking(steps=1), DeepThinking(steps=2)),
    "linked": (Linked(1), Linked(2)),
}


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"sequential"}))
def test_every_method_can_be_calibrated(name: str) -> None:
    settings = SETTINGS.get(name, ())
    tried = [METHODS[name](), *settings]
    profile = calibrate(examples(), method=name, settings=tried, refine=name == "deep-thinking")
    assert len({row.method for row in profile.settings}) >= 1 + len(settings)
    assert all(0 <= row.figures["divergence"].value < 50 for row in profile.settings)
    if settings:
        values = {round(row.figures["divergence"].value, 7) for row in profile.settings}
        assert len(values) > 1


def test_labels_decide_where_all_examples_have_them() -> None:
    labelled = examples(labelled=True)
    assert calibrate(labelled).criteria == ("exact match", "log-probability")
    assert calibrate(labelled, by="agreement").criteria == ("divergence",)
    mixed = [*labelled, *examples(2)]
    assert calibrate(mixed).criteria == ("divergence",)
    by_labels = calibrate(mixed, by="labels")
    assert (by_labels.examples, by_labels.criteria[0]) == (8, "exact match")
    assert by_labels.settings[0].figures.keys() >= {"divergence", "agreement", "exact match"}


def test_a_metric_judges_generated_answers() -> None:
    heard: list[tuple[str, str]] = []

    def metric(prediction: str, answer: str) -> float:
        heard.append((prediction, answer))
        return float(len(prediction))

    labelled = examples(labelled=True)
    profile = calibrate(labelled, metric=metric)
    lm = small.lm()
    texts = {
        lm.generate(
            one.query, one.passages, method=method, max_new_tokens=4, do_sample=False
        ).text.strip()
        for one in labelled
        for method in (APE(), *GRID)
    }
    assert {prediction for prediction, _ in heard} == texts
    assert {answer for _, answer in heard} == {one.answer for one in labelled}
    assert profile.criteria == ("metric", "log-probability")
    with pytest.raises(InputError, match="A metric compares with right answers"):
        calibrate(examples(), metric=metric)


def test_what_does_not_fit_sequentially_is_left_out_and_told() -> None:
    long = [Passage("stone " * 60 + str(number)) for number in range(3)]
    given = [*examples(), Example("Which?", long), Example("Who?")]
    profile = calibrate(given)
    assert profile.examples == 8
    first, second = profile.left_out
    assert first.startswith("Example 9 was left out: Read one after the other, the passages pass")
    assert second == "Example 10 was left out: it has no passages."
    in_order = calibrate(given, settings=[*GRID, Linked(1)], by="agreement")
    assert in_order.examples == 8
    labelled = [*examples(labelled=True), Example("Which?", long, "stone")]
    kept = calibrate(labelled)
    assert kept.examples == 9
    assert kept.left_out[0].startswith("Example 9 is not compared with sequential reading: ")


def test_few_examples_and_wrong_settings_are_refused() -> None:
    with pytest.raises(InputError, match="at least 8 examples that can be used, and got 7"):
        calibrate(examples(7))
    with pytest.raises(InputError, match=r"got 7; .*Example 1 was left out: it has no passages"):
        calibrate([Example("Who?"), *examples(7)])
    with pytest.raises(InputError, match="at least 8 labelled examples"):
        calibrate(examples(), by="labels")
    with pytest.raises(InputError, match="'sequential' reads no windows"):
        calibrate(examples(), method="sequential")
    with pytest.raises(InputError, match="settings must be methods"):
        calibrate(examples(), settings=["ape"])
    with pytest.raises(InputError, match="by must be"):
        calibrate(examples(), by="luck")
    with pytest.raises(MethodError, match="nonsense"):
        calibrate(examples(), method="nonsense")
    with pytest.raises(InputError, match="must be an Example"):
        calibrate(["Who?"] * 8)


def test_the_same_seed_gives_the_same_profile() -> None:
    one, other = calibrate(examples()), calibrate(examples(), seed=1)
    assert (
        calibrate(
            [{"query": e.query, "passages": list(e.passages), "kind": e.kind} for e in examples()]
        )
        == one
    )
    assert other.settings[0].figures != one.settings[0].figures


def test_both_kinds_of_questions_give_the_guard_its_threshold() -> None:
    lm, method = small.lm(), APE(1.0, 1.0)
    profile = calibrate(examples(kinds=True), method=method, settings=[method])
    assert profile.guard is not None
    assert (profile.guard["single_hop"], profile.guard["multi_hop"]) == (4, 4)
    above = {False: 0, True: 0}
    for one in examples(kinds=True):
        out = lm.generate(
            one.query, one.passages, method=method, max_new_tokens=Guard().rows, do_sample=False
        )
        spread = mass_spread([citation.mass for citation in out.citations or ()])
        above[one.multi_hop] += spread > profile.guard["threshold"]
    assert above[False] / 4 == profile.guard["false_alarms"]
    assert 1 - above[True] / 4 == profile.guard["missed"]
    assert calibrate(examples(), settings=[method]).guard is None


def test_progress_is_told_to_its_end() -> None:
    told: list[tuple[str, int, int | None]] = []
    calibrate(examples(kinds=True), on_progress=lambda *one: told.append(one))
    assert list(dict.fromkeys(what for what, _, _ in told)) == [
        "Reading sequentially",
        "Trying settings",
        "Measuring attention",
    ]
    assert told[-1][1] == told[-1][2] == 8
    assert ("Trying settings", 32, 32) in told


def test_a_cache_serves_a_calibration() -> None:
    from rag_windows import PassageCache

    lm = WindowedLM.from_pretrained(
        small.model(), tokenizer=small.tokenizer(), cache=PassageCache(memory="16MiB")
    )
    assert lm.calibrate(examples(), **QUICK) == calibrate(examples())
    out = lm.generate("Which door?", examples()[0].passages, max_new_tokens=2)
    assert out.usage.cached_tokens > 0
