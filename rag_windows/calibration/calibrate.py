"""A calibration from examples to a profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rag_windows.calibration.choose import bootstrap, multi_hop_threshold, search, verdict
from rag_windows.calibration.example import Example
from rag_windows.calibration.grid import default_grid
from rag_windows.calibration.measure import (
    KEEP_BYTES,
    Measuring,
    Metric,
    OnProgress,
    Prepared,
    Table,
    prepare,
)
from rag_windows.calibration.model_fingerprint import ModelFingerprint
from rag_windows.calibration.profile import Figure, Profile, Setting
from rag_windows.engine import Engine
from rag_windows.errors import InputError
from rag_windows.methods import Method, resolve

By = Literal["labels", "agreement"]

FEWEST = 8
"""Examples below which no interval is worth its name."""


def calibrate(
    engine: Engine,
    examples: Iterable[Example | Mapping[str, Any]],
    *,
    method: str | Method = "ape",
    settings: Sequence[Method] | None = None,
    by: By | None = None,
    metric: Metric | None = None,
    prefix: str | None = None,
    max_new_tokens: int = 32,
    refine: bool = True,
    seed: int = 0,
    keep_bytes: int = KEEP_BYTES,
    on_progress: OnProgress | None = None,
) -> Profile:
    """What `WindowedLM.calibrate` does, with its arguments.

    Raises:
        InputError: fewer than eight examples can be used, or settings that read no windows.
    """
    default = resolve(method)
    coarse = list(dict.fromkeys([default, *(settings or default_grid(default))]))
    for one in coarse:
        _check(one)
    given = [Example.of(example) for example in examples]
    if by not in (None, "labels", "agreement"):
        raise InputError(f"by must be 'labels', 'agreement' or None, got {by!r}.")
    labelled = by == "labels" or (by is None and all(one.answer is not None for one in given))
    if metric is not None and not labelled:
        raise InputError("A metric compares with right answers: give every example one, or by=.")
    if labelled:
        given = [one for one in given if one.answer is not None]
    tell = on_progress or _silent
    ready, left_out = prepare(
        engine,
        given,
        coarse,
        prefix=prefix,
        max_new_tokens=max_new_tokens,
        need_reference=not labelled,
        on_progress=tell,
    )
    if len(ready) < FEWEST:
        reasons = f" {' '.join(left_out[:3])}" if left_out else ""
        kind = "labelled " if labelled else ""
        raise InputError(
            f"Calibration needs at least {FEWEST} {kind}examples that can be used, and got "
            f"{len(ready)}; a few dozen make the choice trustworthy.{reasons}"
        )
    measuring = Measuring(
        engine, ready, metric=metric, max_new_tokens=max_new_tokens, keep_bytes=keep_bytes
    )

    def measure(some: Sequence[Method]) -> Table:
        measuring.run(some, tell)
        return measuring.table

    criteria: tuple[Figure, ...] = ("divergence",)
    if labelled:
        criteria = ("exact match" if metric is None else "metric", "log-probability")
    numbers = [one.number for one in ready]
    choice = search(coarse, default, numbers, criteria, measure, refine=refine, seed=seed)
    beats_default, sentence = verdict(choice.best, default, choice.held_out)
    chosen = choice.best if beats_default else default
    return Profile(
        method=chosen,
        best=choice.best,
        default=default,
        beats_default=beats_default,
        verdict=sentence,
        criteria=criteria,
        settings=_settings(measuring.table, coarse, choice.fine, seed),
        held_out=choice.held_out,
        examples=len(ready),
        folds=choice.folds,
        seed=seed,
        left_out=tuple(left_out),
        model=ModelFingerprint.of(engine.model),
        guard=_guard(measuring, ready, chosen, tell),
    )


def _check(setting: Any) -> None:
    if not isinstance(setting, Method):
        raise InputError(f"settings must be methods such as APE(0.8, 0.7), got {setting!r}.")
    if not setting.windowed:
        raise InputError(
            f"The method {setting.name!r} reads no windows, so there is nothing to calibrate."
        )


def _settings(
    table: Table, coarse: Sequence[Method], fine: Sequence[Method], seed: int
) -> tuple[Setting, ...]:
    settings = [*coarse, *fine]
    means: dict[Any, Any] = {
        figure: bootstrap([list(rows[one].values()) for one in settings], seed)
        for figure, rows in table.items()
    }
    return tuple(
        Setting(one, {figure: found[place] for figure, found in means.items()}, one in fine)
        for place, one in enumerate(settings)
    )


def _guard(
    measuring: Measuring, ready: Sequence[Prepared], method: Method, tell: OnProgress
) -> dict[str, Any] | None:
    if len({one.example.multi_hop for one in ready}) < 2:
        return None
    spreads: dict[bool, list[float]] = {False: [], True: []}
    for place, one in enumerate(ready):
        tell("Measuring attention", place, len(ready))
        spread = measuring.spread(one, method)
        if spread is not None:
            spreads[one.example.multi_hop].append(spread)
    tell("Measuring attention", len(ready), len(ready))
    return multi_hop_threshold(spreads[False], spreads[True])


def _silent(what: str, done: int, whole: int | None) -> None:
    """Nobody listens."""
