"""A recording that fails or answers otherwise is found out, and changes no answer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from rag_windows.step.graphs import Run
from tests.rag_windows import small

from . import models
from .models import OTHER, WINDOWS, expected, ids
from .tapes import Refused, Tapes


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


class Failing(Tapes):
    """Records nothing."""

    def record(self, run: Run) -> Run:
        self.recorded += 1
        raise RuntimeError("operation not permitted when stream is capturing")


class Frozen(Tapes):
    """Gives for ever what the first launch gave."""

    def record(self, run: Run) -> Run:
        super().record(run)
        results = tuple(result.clone() for result in run())
        return lambda: results


class Broken(Tapes):
    """Can't launch what it recorded."""

    def record(self, run: Run) -> Run:
        super().record(run)

        def replay() -> tuple[torch.Tensor, ...]:
            raise RuntimeError("invalid argument")

        return replay


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Failing, "not permitted"), (Frozen, "differs"), (Broken, "invalid argument")],
)
def test_a_recording_that_fails_is_left_out_for_good(
    kind: type[Tapes], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    lm, tapes = models.recorded_small(kind())
    for windows in (WINDOWS, OTHER, WINDOWS):
        assert ids(lm, 12, windows) == expected(12, windows)
    assert tapes.recorded == 1
    (line,) = lines(caplog)
    assert said in line


def test_threads_that_fail_at_once_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    lm, _ = models.recorded_small()
    for _ in range(2):
        models.steps(lm)._give_up("failed")
    assert len(lines(caplog)) == 1
    assert not models.steps(lm).usable


def test_a_model_whose_step_needs_the_host_keeps_ordinary_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Gemma 3 with its image tower writes a number of the host into its input."""
    lm, tapes = models.recorded("gemma3")
    plain = models.ordinary("gemma3")
    for windows in (WINDOWS, OTHER):
        assert ids(lm, 8, windows) == ids(plain, 8, windows)
    assert tapes.recorded == 0
    assert "could not be recorded" in lines(caplog)[0]


def test_wrong_shares_are_noticed_too(caplog: pytest.LogCaptureFixture) -> None:
    class Shares(Tapes):
        def record(self, run: Run) -> Run:
            replay = super().record(run)

            def wrong() -> tuple[torch.Tensor, ...]:
                logits, shares = replay()
                return logits, shares.flip(-1)

            return wrong

    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    lm, tapes = models.recorded_small(Shares())
    made = lm.generate("Why?", ["Because.", "No, it is so."], **options)
    wanted = small.lm().generate("Why?", ["Because.", "No, it is so."], **options)
    assert [one.mass for one in made.citations or ()] == [
        one.mass for one in wanted.citations or ()
    ]
    assert tapes.played == 1
    assert "differs" in lines(caplog)[0]


@pytest.mark.parametrize("work", [lambda x: x.sum().item(), lambda x: x + torch.tensor(1.0)])
def test_a_tape_refuses_what_a_graph_can_not_hold(work: Any) -> None:
    tapes, held = Tapes(), torch.ones(3)

    def run() -> tuple[torch.Tensor, ...]:
        return (held * work(held),)

    with tapes.turn(), pytest.raises(Refused):
        tapes.record(run)


def test_a_tape_does_the_work_and_not_the_python_again() -> None:
    tapes, held, seen = Tapes(), torch.ones(3), []

    def run() -> tuple[torch.Tensor, ...]:
        seen.append(1)
        return (held.view(3, 1) * len(seen),)

    with tapes.turn():
        replay = tapes.record(run)
        held.fill_(5.0)
        assert replay()[0].flatten().tolist() == [10.0] * 3
    assert len(seen) == 2
