"""Which questions are shown."""

from __future__ import annotations

from dataclasses import replace

from rag_windows.evaluation.report import ReportedRun
from rag_windows.evaluation.report.questions import chosen
from tests.rag_windows.evaluation.report import invented


def run(values: dict[tuple[str, int], float], count: int = 12) -> ReportedRun:
    made = invented.run(
        methods=("sequential", "ape"), depths=(2,), questions=count, passages=2, timed=False
    )
    keys = [one.key for one in made.examples]
    found = {(arm, key): 50.0 for arm in ("sequential@2", "ape@2") for key in keys}
    found |= {(arm, keys[place]): value for (arm, place), value in values.items()}
    return replace(made, values=found)


def test_gains_losses_and_a_draw() -> None:
    made = run({("ape@2", 3): 90.0, ("ape@2", 7): 100.0, ("ape@2", 5): 10.0})
    found = chosen(made, 6)
    why = dict(found)
    assert [place for place, _ in found][:3] == [7, 3, 5]
    assert why[7] == "gain: ape@2 +50.0 points against sequential@2"
    assert why[5] == "loss: ape@2 -40.0 points against sequential@2"
    assert [why for _, why in found[3:]] == ["drawn at random"] * 3
    assert chosen(made, 6) == found


def test_no_more_than_a_third_are_gains() -> None:
    made = run({("ape@2", place): 60.0 + place for place in range(10)})
    found = chosen(made, 6)
    assert [place for place, _ in found][:2] == [9, 8]
    assert sum("gain" in why for _, why in found) == 2
    assert len({place for place, _ in found}) == 6


def test_unanswered_questions_come_last() -> None:
    made = run({}, count=5)
    missing = made.examples[0].key
    records = {name: one for name, one in made.records.items() if name != ("ape@2", missing)}
    found = chosen(replace(made, records=records), 10)
    assert found[-1][0] == 0
    assert sorted(place for place, _ in found) == [0, 1, 2, 3, 4]


def test_without_a_base_the_best_and_the_worst() -> None:
    made = invented.run(methods=("ape",), depths=(2,), questions=9, passages=2, timed=False)
    values = {("ape@2", one.key): float(place) for place, one in enumerate(made.examples)}
    found = chosen(replace(made, values=values), 6)
    assert [place for place, _ in found][:4] == [8, 7, 0, 1]
    assert found[2][1] == "ape@2 has 0.0"
